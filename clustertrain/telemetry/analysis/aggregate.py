"""The totals of a GPU, a host or a rank over all segments that have it, as the report shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from clustertrain.run import heartbeat
from clustertrain.telemetry import fields
from clustertrain.telemetry.analysis.node_records import ALL, Part
from clustertrain.telemetry.report_schema import (
    Errors,
    GpuSummary,
    HostSummary,
    InPhase,
    ProcessSummary,
    RankSummary,
    Stats,
    Throttled,
    Timeline,
    Xid,
)
from clustertrain.telemetry.store.totals import Total
from clustertrain.telemetry.store.writer import GpuFacts

GIB = 1 << 30
# Names that differ between the files and the report, where also the units do.
_REPORTED = {"memory_used_bytes": "memory_used_gib"}


@dataclass
class Piece:
    """One GPU in one part; ``device`` is its name in the part's columns."""

    part: Part
    facts: GpuFacts
    device: str

    def total(self, field: str) -> Total | None:
        return self.part.totals.get(fields.column(self.device, field))

    def has(self, field: str) -> bool:
        """Whether the field was asked for; where nothing was recorded it would have been."""
        segment = self.part.segment
        at = fields.column(self.device, field)
        return segment is None or at in segment.header.fast or at in segment.header.slow

    @property
    def reasons(self) -> dict[str, str]:
        """By field."""
        if self.part.no_nvml is not None:
            return dict.fromkeys((f.name for f in fields.GPU), f"no NVML: {self.part.no_nvml}")
        of_all = {} if self.part.segment is None else self.part.segment.reasons()
        return {fields.split(c)[1]: why for c, why in of_all.items() if fields.split(c)[0] == self.device}


def _merged(totals: Iterable[Total | None]) -> Total:
    whole = Total()
    for total in totals:
        if total is not None:
            whole.merge(total)
    return whole


def _stats(total: Total, scale: float = 1.0) -> Stats | None:
    if not total.count:
        return None
    numbers = (total.mean, *(total.quantile(q) for q in (0.05, 0.5, 0.95)), total.high)
    return Stats(*(round(v / scale, 4) for v in numbers))


def _both(totals: Mapping[str, Total], *names: str) -> Stats | None:
    """What goes in and out together. Of the sum only the mean is known; the rest is of the larger direction."""
    there = [totals[n] for n in names if totals[n].count]
    if not there:
        return None
    most = max(there, key=lambda t: t.mean)
    stats = _stats(most)
    return None if stats is None else msgspec.structs.replace(stats, mean=round(sum(t.mean for t in there), 4))


def gpu(
    key: tuple[str, str], pieces: list[Piece], owned: list[Piece], timeline: Timeline | None, xids: list[Xid]
) -> GpuSummary:
    """``owned``: the pieces whose energy counts here."""
    facts = pieces[-1].facts
    totals = {f.name: _merged(p.total(f.name) for p in pieces) for f in fields.GPU}
    energy_j, source = _energy(owned)
    total_bytes = next((p.facts.memory_total_bytes for p in reversed(pieces) if p.facts.memory_total_bytes), None)
    nulls = _nulls(pieces, totals, facts.reason)
    if energy_j is not None:
        nulls.pop("energy_j", None)
    elif len(owned) < len(pieces):
        nulls["energy_j"] = "counted with another node, which has the same GPU"
    if total_bytes is None:
        nulls["memory_total_gib"] = facts.reason or "the driver did not say"
    return GpuSummary(
        node=key[0],
        uuid=key[1],
        index=facts.index,
        name=next((p.facts.name for p in reversed(pieces) if p.facts.name), None),
        ranks=facts.ranks,
        attempts=sorted({p.part.attempt for p in pieces}),
        samples=max(t.count for t in totals.values()),
        expected=sum(p.part.expected for p in pieces),
        utilization=_stats(totals["utilization"]),
        memory_used_gib=_stats(totals["memory_used_bytes"], GIB),
        memory_total_gib=None if total_bytes is None else round(total_bytes / GIB, 3),
        power_w=_stats(totals["power_w"]),
        energy_j=energy_j,
        energy_source=source,
        temperature_c=_stats(totals["temperature_c"]),
        sm_clock_mhz=_stats(totals["sm_clock_mhz"]),
        memory_clock_mhz=_stats(totals["memory_clock_mhz"]),
        timeline=timeline or Timeline(1.0, []),
        nulls=nulls,
        sm_activity=_stats(totals["sm_activity"]),
        tensor_activity=_stats(totals["tensor_activity"]),
        dram_activity=_stats(totals["dram_activity"]),
        pcie_bytes_per_s=_both(totals, "pcie_tx_bytes", "pcie_rx_bytes"),
        nvlink_bytes_per_s=_both(totals, "nvlink_tx_bytes", "nvlink_rx_bytes"),
        processes_max=_whole(totals["processes"].high),
        nvlinks_active_min=_whole(totals["nvlinks_active"].low),
        nvlinks_active_max=_whole(totals["nvlinks_active"].high),
        throttled=Throttled(*(_share(totals[f"throttle_{why}"]) for why in ("power", "thermal", "hardware"))),
        errors=_errors(totals, xids),
        phases=_phases(totals),
        parent=facts.parent,
        power_limit_w=facts.power_limit_w,
    )


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)


def _share(total: Total) -> float | None:
    return round(total.mean, 4) if total.count else None


def _errors(totals: Mapping[str, Total], xids: list[Xid]) -> Errors:
    def grown(name: str) -> int | None:
        total = totals[name]
        return None if math.isnan(total.first) else int(total.increase)

    def ever(name: str) -> bool | None:
        total = totals[name]
        return None if math.isnan(total.last) else total.last > 0

    rows = totals["remapped_rows"]
    return Errors(
        ecc_corrected=grown("ecc_corrected"),
        ecc_uncorrected=grown("ecc_uncorrected"),
        remapped_rows=None if math.isnan(rows.last) else int(rows.last - rows.first),
        remap_pending=ever("remap_pending"),
        remap_failed=ever("remap_failed"),
        nvlink_errors=grown("nvlink_errors"),
        pcie_replays=grown("pcie_replays"),
        xids=xids,
    )


def _phases(totals: Mapping[str, Total]) -> dict[str, InPhase]:
    seen = totals["utilization"].by_phase or totals["power_w"].by_phase
    whole = sum(count for count, _ in seen.values())

    def mean(field: str, phase: int) -> float | None:
        count, total = totals[field].by_phase.get(phase, (0, 0.0))
        return round(total / count, 4) if count else None

    return {
        heartbeat.PHASES[phase]: InPhase(
            share=round(count / whole, 4),
            utilization=mean("utilization", phase),
            power_w=mean("power_w", phase),
            sm_clock_mhz=mean("sm_clock_mhz", phase),
            sm_activity=mean("sm_activity", phase),
            tensor_activity=mean("tensor_activity", phase),
            throttled=Throttled(*(mean(f"throttle_{why}", phase) for why in ("power", "thermal", "hardware"))),
        )
        for phase, (count, _) in sorted(seen.items())
        if count and phase < len(heartbeat.PHASES)
    }


def _nulls(pieces: list[Piece], totals: Mapping[str, Total], lost: str | None) -> dict[str, str]:
    """Why a field is missing, with the share of samples where it is not missing throughout."""
    # What NVML says of a field tells more than that there was no NVML for a while.
    by_worth = sorted(pieces, key=lambda p: p.part.no_nvml is None)
    known = {field: why for p in by_worth for field, why in p.reasons.items()}
    found = {}
    for field in fields.GPU:
        if not any(p.has(field.name) for p in pieces):
            continue
        rows = sum(p.part.rows(field.pace) for p in pieces)
        there = totals[field.name].count
        if field.kind == "counter" and not math.isnan(totals[field.name].first):
            there += len(pieces)  # the first value gives no rate yet
        missing = rows - min(there, rows)
        if not missing and rows:
            continue
        reason = known.get(field.name) or lost or ("no reason was recorded" if rows else "no sample was recorded")
        partly = f" ({missing} of {rows} samples)" if missing < rows else ""
        found[_REPORTED.get(field.name, field.name)] = reason + partly
    return found


def owners(pieces: Mapping[tuple[str, str], list[Piece]]) -> dict[tuple[str, int], str]:
    """By UUID and attempt the node with which a GPU's energy and hours count, of several the one that had it longest: a
    UUID is one GPU, though all nodes of the local backend list it."""
    held: dict[tuple[str, int], dict[str, float]] = {}
    for (node, uuid), found in pieces.items():
        for piece in found:
            if uuid.startswith(("GPU-", "MIG-")):  # others are names for what NVML does not list
                by_node = held.setdefault((uuid, piece.part.attempt), {})
                by_node[node] = by_node.get(node, 0.0) + piece.part.held_s
    return {of: max(by_node, key=lambda node: by_node[node]) for of, by_node in held.items()}


def owned(key: tuple[str, str], pieces: list[Piece], owner: Mapping[tuple[str, int], str]) -> list[Piece]:
    """Those that count with this node."""
    node, uuid = key
    return [p for p in pieces if owner.get((uuid, p.part.attempt), node) == node]


def tells_energy(owned: Iterable[Piece]) -> bool:
    """Whether next to all the time of all these GPUs has an energy figure, so that it can be set against the tokens."""
    held_s = told_s = 0.0
    for piece in owned:
        held_s += piece.part.held_s
        told = any(t is not None and t.count for t in (piece.total("energy_j"), piece.total("power_w")))
        told_s += piece.part.held_s * told
    return told_s > 0 and told_s >= ALL * held_s


def _energy(pieces: list[Piece]) -> tuple[float | None, str | None]:
    """Joules over all pieces, and where they come from."""
    total, sources = 0.0, set()
    for piece in pieces:
        counter, power = piece.total("energy_j"), piece.total("power_w")
        if counter is not None and counter.count:
            total += counter.increase
            sources.add("counter")
        elif power is not None and power.count:
            total += power.sum * piece.part.sample_s
            sources.add("power")
    if not sources:
        return None, None
    return round(total, 1), sources.pop() if len(sources) == 1 else "mixed"


def host(node: str, parts: list[Part], clock_steps_s: list[float]) -> HostSummary:
    recorded = [p for p in parts if p.segment is not None]
    header = recorded[-1].segment.header if recorded and recorded[-1].segment else None
    totals = {f.name: _merged(p.totals.get(fields.column("host", f.name)) for p in recorded) for f in fields.HOST}
    why = [w for p in recorded if p.segment for w in p.segment.reasons().items()]
    nulls = {fields.split(c)[1]: w for c, w in why if fields.split(c)[0] == "host"}
    total = header.memory_total_bytes if header else None
    memory = header.memory_allocated_bytes if header else None
    return HostSummary(
        node=node,
        attempts=sorted({p.attempt for p in parts}),
        samples=sum(p.received for p in parts),
        expected=sum(p.expected for p in parts),
        nvml=next((p.no_nvml for p in reversed(recorded) if p.no_nvml is not None), None),
        nvml_missing_s=sum(p.held_s for p in recorded if p.no_nvml is not None),
        driver=header.driver if header else None,
        allocation=header.allocation if header else None,
        cpu=_stats(totals["cpu"]),
        cpu_count=header.cpu_count if header else None,
        memory_used_gib=_stats(totals["memory_used_bytes"], GIB),
        memory_total_gib=None if total is None else round(total / GIB, 3),
        load1=_stats(totals["load1"]),
        processes=_processes(totals),
        nulls={_REPORTED.get(k, k): v for k, v in nulls.items()},
        cpu_allocated=header.cpu_allocated if header else None,
        agents_max=max(p.agents for p in parts),
        silent_s=round(max(p.silent_s for p in parts), 1),
        clock_steps_s=clock_steps_s,
        memory_allocated_gib=None if memory is None else round(memory / GIB, 3),
        network_bytes_per_s=_both(totals, "network_rx_bytes", "network_tx_bytes"),
        infiniband_bytes_per_s=_both(totals, "infiniband_rx_bytes", "infiniband_tx_bytes"),
        disk_bytes_per_s=_both(totals, "disk_read_bytes", "disk_write_bytes"),
    )


def _processes(totals: Mapping[str, Total]) -> ProcessSummary | None:
    rss = _stats(totals["job_memory_bytes"], GIB)
    cores = _stats(totals["job_cpu_s"])  # seconds of processor time a second
    return None if rss is None else ProcessSummary(rss, cores, int(totals["job_processes"].high))


def ranks(parts: list[Part]) -> list[RankSummary]:
    """Each rank in the newest attempt that it told of itself."""
    found: dict[int, RankSummary] = {}
    for part in sorted(parts, key=lambda p: (p.attempt, p.start)):
        if part.segment is None:
            continue
        uuids = {rank: g.uuid for g in part.gpus for rank in g.ranks}
        for rank in part.segment.header.ranks:
            of = {f.name: part.totals.get(fields.column(f"rank{rank}", f.name), Total()) for f in fields.RANK}
            if math.isnan(of["step"].last):
                continue
            steps = of["step"].increase
            found[rank] = RankSummary(
                rank=rank,
                node=part.node,
                uuid=uuids.get(rank),
                step=int(of["step"].last),
                data_wait_s=_a_step(of["data_wait_s"], steps),
                forward_s=_a_step(of["forward_s"], steps),
                memory_gib=_stats(of["memory_bytes"], GIB),
                cpu_cores=round(of["cpu_s"].mean, 3) if of["cpu_s"].count else None,
            )
    return [found[r] for r in sorted(found)]


def _a_step(total: Total, steps: float) -> float | None:
    return round(total.increase / steps, 6) if total.count and steps else None
