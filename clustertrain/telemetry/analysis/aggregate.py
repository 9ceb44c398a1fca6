"""Totals of a GPU, a host or a rank over all its segments, in the form of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from clustertrain.run import heartbeat
from clustertrain.telemetry import fields
from clustertrain.telemetry.analysis.node_records import FULL_COVERAGE, NodeRecord
from clustertrain.telemetry.report_schema import (
    ErrorCounts,
    GpuSummary,
    HostSummary,
    PhaseStats,
    ProcessSummary,
    RankSummary,
    Stats,
    ThrottleShares,
    Timeline,
    XidRecord,
)
from clustertrain.telemetry.store.totals import Total
from clustertrain.telemetry.store.writer import GpuFacts

GIB = 1 << 30
# Names that differ between files and report because the unit differs.
_REPORT_NAMES = {"memory_used_bytes": "memory_used_gib"}


@dataclass
class GpuRecord:
    """One GPU in one record of its node."""

    node_record: NodeRecord
    facts: GpuFacts
    device: str  # its name in the record's columns

    def total(self, field: str) -> Total | None:
        return self.node_record.totals.get(fields.column_name(self.device, field))

    def has_field(self, field: str) -> bool:
        """Return whether the field was sampled, or would have been if nothing was recorded."""
        segment = self.node_record.segment
        column = fields.column_name(self.device, field)
        return segment is None or column in segment.header.fast or column in segment.header.slow

    @property
    def reasons(self) -> dict[str, str]:
        """Reasons for missing values by field."""
        if self.node_record.nvml_error is not None:
            return dict.fromkeys((f.name for f in fields.GPU), f"no NVML: {self.node_record.nvml_error}")
        all_reasons = {} if self.node_record.segment is None else self.node_record.segment.reasons()
        return {
            fields.split_column(c)[1]: why for c, why in all_reasons.items() if fields.split_column(c)[0] == self.device
        }


def _merge_totals(totals: Iterable[Total | None]) -> Total:
    merged = Total()
    for total in totals:
        if total is not None:
            merged.merge(total)
    return merged


def _stats(total: Total, scale: float = 1.0) -> Stats | None:
    if not total.count:
        return None
    numbers = (total.mean, *(total.quantile(q) for q in (0.05, 0.5, 0.95)), total.high)
    return Stats(*(round(v / scale, 4) for v in numbers))


def _sum_directions(totals: Mapping[str, Total], *names: str) -> Stats | None:
    """Return the traffic of both directions: the mean of the sum, other statistics of the larger direction."""
    present = [totals[n] for n in names if totals[n].count]
    if not present:
        return None
    largest = max(present, key=lambda t: t.mean)
    stats = _stats(largest)
    return None if stats is None else msgspec.structs.replace(stats, mean=round(sum(t.mean for t in present), 4))


def summarize_gpu(
    key: tuple[str, str],
    records: list[GpuRecord],
    owned_records: list[GpuRecord],
    timeline: Timeline | None,
    xids: list[XidRecord],
) -> GpuSummary:
    """Summarize a GPU; ``owned_records`` are the records whose energy counts for this node."""
    facts = records[-1].facts
    totals = {f.name: _merge_totals(p.total(f.name) for p in records) for f in fields.GPU}
    energy_j, energy_source = _total_energy(owned_records)
    total_bytes = next((p.facts.memory_total_bytes for p in reversed(records) if p.facts.memory_total_bytes), None)
    missing = _missing_reasons(records, totals, facts.reason)
    if energy_j is not None:
        missing.pop("energy_j", None)
    elif len(owned_records) < len(records):
        missing["energy_j"] = "counted for another node that has the same GPU"
    if total_bytes is None:
        missing["memory_total_gib"] = facts.reason or "not reported by the driver"
    return GpuSummary(
        node=key[0],
        uuid=key[1],
        index=facts.index,
        name=next((p.facts.name for p in reversed(records) if p.facts.name), None),
        ranks=facts.ranks,
        attempts=sorted({p.node_record.attempt for p in records}),
        samples=max(t.count for t in totals.values()),
        samples_expected=sum(p.node_record.expected for p in records),
        utilization=_stats(totals["utilization"]),
        memory_used_gib=_stats(totals["memory_used_bytes"], GIB),
        memory_total_gib=None if total_bytes is None else round(total_bytes / GIB, 3),
        power_w=_stats(totals["power_w"]),
        energy_j=energy_j,
        energy_source=energy_source,
        temperature_c=_stats(totals["temperature_c"]),
        sm_clock_mhz=_stats(totals["sm_clock_mhz"]),
        memory_clock_mhz=_stats(totals["memory_clock_mhz"]),
        timeline=timeline or Timeline(1.0, []),
        missing=missing,
        sm_activity=_stats(totals["sm_activity"]),
        tensor_activity=_stats(totals["tensor_activity"]),
        dram_activity=_stats(totals["dram_activity"]),
        pcie_bytes_per_s=_sum_directions(totals, "pcie_tx_bytes", "pcie_rx_bytes"),
        nvlink_bytes_per_s=_sum_directions(totals, "nvlink_tx_bytes", "nvlink_rx_bytes"),
        processes_max=_to_int(totals["processes"].high),
        nvlinks_active_min=_to_int(totals["nvlinks_active"].low),
        nvlinks_active_max=_to_int(totals["nvlinks_active"].high),
        throttle_ratio=ThrottleShares(
            *(_mean_share(totals[f"throttle_{why}"]) for why in ("power", "thermal", "hardware"))
        ),
        errors=_errors(totals, xids),
        phases=_phases(totals),
        parent=facts.parent,
        power_limit_w=facts.power_limit_w,
    )


def _to_int(value: float) -> int | None:
    return None if math.isnan(value) else int(value)


def _mean_share(total: Total) -> float | None:
    return round(total.mean, 4) if total.count else None


def _errors(totals: Mapping[str, Total], xids: list[XidRecord]) -> ErrorCounts:
    def increase(name: str) -> int | None:
        total = totals[name]
        return None if math.isnan(total.first) else int(total.increase)

    def is_set(name: str) -> bool | None:
        total = totals[name]
        return None if math.isnan(total.last) else total.last > 0

    rows = totals["remapped_rows"]
    return ErrorCounts(
        ecc_corrected=increase("ecc_corrected"),
        ecc_uncorrected=increase("ecc_uncorrected"),
        remapped_rows=None if math.isnan(rows.last) else int(rows.last - rows.first),
        remap_pending=is_set("remap_pending"),
        remap_failed=is_set("remap_failed"),
        nvlink_errors=increase("nvlink_errors"),
        pcie_replays=increase("pcie_replays"),
        xids=xids,
    )


def _phases(totals: Mapping[str, Total]) -> dict[str, PhaseStats]:
    by_phase = totals["utilization"].by_phase or totals["power_w"].by_phase
    total_samples = sum(count for count, _ in by_phase.values())

    def mean(field: str, phase: int) -> float | None:
        count, total = totals[field].by_phase.get(phase, (0, 0.0))
        return round(total / count, 4) if count else None

    return {
        heartbeat.PHASES[phase]: PhaseStats(
            share=round(count / total_samples, 4),
            utilization=mean("utilization", phase),
            power_w=mean("power_w", phase),
            sm_clock_mhz=mean("sm_clock_mhz", phase),
            sm_activity=mean("sm_activity", phase),
            tensor_activity=mean("tensor_activity", phase),
            throttle_ratio=ThrottleShares(
                *(mean(f"throttle_{why}", phase) for why in ("power", "thermal", "hardware"))
            ),
        )
        for phase, (count, _) in sorted(by_phase.items())
        if count and phase < len(heartbeat.PHASES)
    }


def _missing_reasons(records: list[GpuRecord], totals: Mapping[str, Total], lost_reason: str | None) -> dict[str, str]:
    """Return the reasons for missing fields, with the number of samples if only some are missing."""
    # NVML's reason for a field is more specific than a temporary lack of NVML.
    ordered = sorted(records, key=lambda p: p.node_record.nvml_error is None)
    reasons = {field: why for p in ordered for field, why in p.reasons.items()}
    missing = {}
    for field in fields.GPU:
        if not any(p.has_field(field.name) for p in records):
            continue
        rows = sum(p.node_record.rows(field.pace) for p in records)
        present = totals[field.name].count
        if field.metric_type == "counter" and not math.isnan(totals[field.name].first):
            present += len(records)  # the first value gives no rate yet
        num_missing = rows - min(present, rows)
        if not num_missing and rows:
            continue
        reason = (
            reasons.get(field.name) or lost_reason or ("no reason was recorded" if rows else "no sample was recorded")
        )
        suffix = f" ({num_missing} of {rows} samples)" if num_missing < rows else ""
        missing[_REPORT_NAMES.get(field.name, field.name)] = reason + suffix
    return missing


def find_owners(records: Mapping[tuple[str, str], list[GpuRecord]]) -> dict[tuple[str, int], str]:
    """Return the node for which a GPU's energy and hours count, by UUID and attempt: the one that held it longest.

    A UUID is a single GPU, but all nodes of the local backend list it.
    """
    held_seconds: dict[tuple[str, int], dict[str, float]] = {}
    for (node, uuid), gpu_records in records.items():
        for record in gpu_records:
            if uuid.startswith(("GPU-", "MIG-")):  # others stand for devices that NVML does not list
                by_node = held_seconds.setdefault((uuid, record.node_record.attempt), {})
                by_node[node] = by_node.get(node, 0.0) + record.node_record.held_s
    return {gpu_attempt: max(by_node, key=lambda node: by_node[node]) for gpu_attempt, by_node in held_seconds.items()}


def select_owned(
    key: tuple[str, str], records: list[GpuRecord], owner: Mapping[tuple[str, int], str]
) -> list[GpuRecord]:
    """Return the records that count for this node."""
    node, uuid = key
    return [p for p in records if owner.get((uuid, p.node_record.attempt), node) == node]


def has_energy_data(records: Iterable[GpuRecord]) -> bool:
    """Return whether energy is known for almost all time of all these GPUs, as needed for energy per token."""
    held_s = covered_s = 0.0
    for record in records:
        held_s += record.node_record.held_s
        has_energy = any(t is not None and t.count for t in (record.total("energy_j"), record.total("power_w")))
        covered_s += record.node_record.held_s * has_energy
    return covered_s > 0 and covered_s >= FULL_COVERAGE * held_s


def _total_energy(records: list[GpuRecord]) -> tuple[float | None, str | None]:
    """Return the joules over all records and their source."""
    total, sources = 0.0, set()
    for record in records:
        counter, power = record.total("energy_j"), record.total("power_w")
        if counter is not None and counter.count:
            total += counter.increase
            sources.add("counter")
        elif power is not None and power.count:
            total += power.sum * record.node_record.sample_s
            sources.add("power")
    if not sources:
        return None, None
    return round(total, 1), sources.pop() if len(sources) == 1 else "mixed"


def summarize_host(node: str, records: list[NodeRecord], clock_steps_s: list[float]) -> HostSummary:
    """Summarize a node."""
    recorded = [p for p in records if p.segment is not None]
    header = recorded[-1].segment.header if recorded and recorded[-1].segment else None
    totals = {
        f.name: _merge_totals(p.totals.get(fields.column_name("host", f.name)) for p in recorded) for f in fields.HOST
    }
    reasons = [w for p in recorded if p.segment for w in p.segment.reasons().items()]
    missing = {fields.split_column(c)[1]: w for c, w in reasons if fields.split_column(c)[0] == "host"}
    total = header.memory_total_bytes if header else None
    memory = header.memory_allocated_bytes if header else None
    return HostSummary(
        node=node,
        attempts=sorted({p.attempt for p in records}),
        samples=sum(p.received for p in records),
        samples_expected=sum(p.expected for p in records),
        nvml_error=next((p.nvml_error for p in reversed(recorded) if p.nvml_error is not None), None),
        nvml_missing_s=sum(p.held_s for p in recorded if p.nvml_error is not None),
        driver=header.driver if header else None,
        allocation_source=header.allocation_source if header else None,
        cpu=_stats(totals["cpu"]),
        cpu_count=header.cpu_count if header else None,
        memory_used_gib=_stats(totals["memory_used_bytes"], GIB),
        memory_total_gib=None if total is None else round(total / GIB, 3),
        load1=_stats(totals["load1"]),
        processes=_summarize_processes(totals),
        missing={_REPORT_NAMES.get(k, k): v for k, v in missing.items()},
        cpu_allocated=header.cpu_allocated if header else None,
        samplers_max=max(p.samplers for p in records),
        agent_lost_s=round(max(p.agent_lost_s for p in records), 1),
        clock_steps_s=clock_steps_s,
        memory_allocated_gib=None if memory is None else round(memory / GIB, 3),
        network_bytes_per_s=_sum_directions(totals, "network_rx_bytes", "network_tx_bytes"),
        infiniband_bytes_per_s=_sum_directions(totals, "infiniband_rx_bytes", "infiniband_tx_bytes"),
        disk_bytes_per_s=_sum_directions(totals, "disk_read_bytes", "disk_write_bytes"),
    )


def _summarize_processes(totals: Mapping[str, Total]) -> ProcessSummary | None:
    rss = _stats(totals["job_memory_bytes"], GIB)
    cores = _stats(totals["job_cpu_s"])  # processor time per second
    return None if rss is None else ProcessSummary(rss, cores, int(totals["job_processes"].high))


def summarize_ranks(records: list[NodeRecord]) -> list[RankSummary]:
    """Summarize each rank in the newest attempt with heartbeats of it."""
    summaries: dict[int, RankSummary] = {}
    for record in sorted(records, key=lambda p: (p.attempt, p.start)):
        if record.segment is None:
            continue
        uuids = {rank: g.uuid for g in record.gpus for rank in g.ranks}
        for rank in record.segment.header.ranks:
            totals = {
                f.name: record.totals.get(fields.column_name(f"rank{rank}", f.name), Total()) for f in fields.RANK
            }
            if math.isnan(totals["step"].last):
                continue
            steps = totals["step"].increase
            summaries[rank] = RankSummary(
                rank=rank,
                node=record.node,
                uuid=uuids.get(rank),
                step=int(totals["step"].last),
                data_wait_s=_per_step(totals["data_wait_s"], steps),
                forward_s=_per_step(totals["forward_s"], steps),
                memory_gib=_stats(totals["memory_bytes"], GIB),
                cpu_cores=round(totals["cpu_s"].mean, 3) if totals["cpu_s"].count else None,
            )
    return [summaries[r] for r in sorted(summaries)]


def _per_step(total: Total, steps: float) -> float | None:
    return round(total.increase / steps, 6) if total.count and steps else None
