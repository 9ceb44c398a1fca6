"""GPUs and ranks that differ from the others, named by node, UUID and rank, each once and with one cause."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping

from clustertrain.telemetry.insights import context as facts
from clustertrain.telemetry.insights.context import CRITICAL, INFO, WARNING, Job, Key, key, of_gpu, outliers, where
from clustertrain.telemetry.report_schema import GpuSummary, Note, RankSummary

THROTTLED = 0.05  # of the training
SLOWER = 0.05  # of the others' clock
LESS_BUSY, LESS_BUSY_BY = 0.2, 0.15  # of the others' utilization, and at least so much of the time
LATER = 0.15  # of the others' forward pass, or wait for data
_FORWARD_FLOOR = _WAIT_FLOOR = 0.05  # of a step: what is later by less delays nobody
_FORWARD_FLOOR_S = 0.001
_WAIT_FLOOR_S = 0.01  # where no step's time is known
_CAPPED = 0.5  # of the training

Found = Mapping[Key, Note]
Kind = tuple[str | None, bool]  # the name, and whether it is a slice


def one_cause_each(job: Job) -> Iterable[Note]:
    """In this order: what explains a GPU first keeps the later rules silent about it, and out of the comparison. A GPU
    that throttles is slower, and its rank late: that is one thing to say and not three."""
    found: dict[Key, Note] = {}
    for rule in _CAUSES:
        found.update({k: note for k, note in rule(job, found).items() if k not in found})
    unused = [n for n in found.values() if n.code == "gpu_unused"]
    if len(unused) > 1:
        text = f"the job did not use {len(unused):,} of {len(job.summary.gpus):,} allocated GPUs"
        fix = "ask for fewer GPUs, or start a rank for each: --nodes times --gpus is the number of ranks"
        yield Note(severity=CRITICAL, code="gpus_unused", text=text, fix=fix)
    yield from found.values()


def _unused(job: Job, found: Found) -> dict[Key, Note]:
    return {key(gpu): _unused_note(job, gpu) for gpu in job.idle}


def _unused_note(job: Job, gpu: GpuSummary) -> Note:
    use, memory, rank = facts.busy(gpu), gpu.memory_used_gib, facts.rank_of(gpu)
    if gpu.samples < facts.SETTLED_SAMPLES and not job.began:
        return of_gpu(gpu, INFO, "gpu_unused_yet", f"{where(gpu)} has not been used yet", None)
    rest = "stayed at 0" if use is None or use.max == 0 else f"was {use.mean:.1%} on average"
    held = ""
    if memory is not None and memory.max >= 1.0:
        held = f", though {memory.max:.1f} GiB of its memory were taken: its rank computes elsewhere, or hangs"
    see = "" if rank is None else f", or see in `clustertrain logs {job.summary.run} --rank {rank}` why its rank idles"
    text = f"{where(gpu)} was not used: its utilization {rest}{held}"
    return of_gpu(gpu, CRITICAL, "gpu_unused", text, f"ask for fewer GPUs{see}")


def _throttled(job: Job, found: Found) -> dict[Key, Note]:
    """Also of a GPU that was lost in the end: heat may be why."""
    notes = {}
    clocks = {_kind(gpus[0]): _known(gpus, facts.sm_clock_mhz) for gpus in _by_kind(job, found)}
    lost = [g for g in job.summary.gpus if key(g) in job.lost and facts.busy(g) is not None]
    for gpu in [*job.working, *lost]:
        shares = [(facts.throttled(gpu, cause) or 0.0, cause) for cause in ("thermal", "hardware")]
        share, cause = max(shares)
        if share < THROTTLED:
            continue
        by = "heat" if cause == "thermal" else "its board or power supply (hardware slowdown)"
        warm = gpu.temperature_c
        reached = f"; it reached {warm.max:.0f} °C" if warm is not None and cause == "thermal" else ""
        text = f"{where(gpu)} throttles: {by} held its clock down for {share:.0%} of the training"
        text += _clock(gpu, clocks.get(_kind(gpu), {}))
        look = "the cooling of the node" if cause == "thermal" else "power cables and power brake of the node"
        fix = f"{job.without(gpu.node)}; ask the administrators to look at {look}"
        notes[key(gpu)] = of_gpu(gpu, WARNING, "throttled", text + reached, fix)
    return notes


def _clock(gpu: GpuSummary, clocks: Mapping[Key, float]) -> str:
    """Its clock beside that of the others of its kind, in words."""
    mine = facts.sm_clock_mhz(gpu)
    if mine is None:
        return ""
    rest = [clock for of, clock in clocks.items() if of != key(gpu)]
    others = statistics.median(rest) if rest else None
    return f", to {mine:,.0f} MHz" + (f" where the others run at {others:,.0f}" if others and others > mine else "")


def _kind(gpu: GpuSummary) -> Kind:
    return gpu.name, gpu.parent is not None


def _by_kind(job: Job, found: Found) -> list[list[GpuSummary]]:
    kinds: dict[Kind, list[GpuSummary]] = {}
    for gpu in job.working:
        if key(gpu) not in found:
            kinds.setdefault(_kind(gpu), []).append(gpu)
    return list(kinds.values())


def _power_capped(job: Job, found: Found) -> dict[Key, Note]:
    """Held down by its power limit where the others are not. That all are is usual at full load."""
    notes = {}
    for gpus in _by_kind(job, found):
        slow = outliers(_known(gpus, facts.sm_clock_mhz), SLOWER, above=False)
        capped = {key(g): s for g in gpus if (s := facts.throttled(g, "power")) is not None}
        more = outliers(capped, 0.0, floor=_CAPPED, above=True)
        for gpu in gpus:
            if key(gpu) in slow and key(gpu) in more:
                mine, others = slow[key(gpu)]
                text = (
                    f"{where(gpu)} is held down by its power limit for {capped[key(gpu)]:.0%} of the training, the "
                    f"others for {more[key(gpu)].others:.0%}: {mine:,.0f} MHz where they run at {others:,.0f}"
                )
                fix = f"compare the limits with `nvidia-smi -q -d POWER`; {job.without(gpu.node)}"
                notes[key(gpu)] = of_gpu(gpu, WARNING, "power_capped", text, fix)
    return notes


def _known(gpus: Iterable[GpuSummary], figure: Callable[[GpuSummary], float | None]) -> dict[Key, float]:
    return {key(g): value for g in gpus if (value := figure(g)) is not None}


def _slow(job: Job, found: Found) -> dict[Key, Note]:
    notes = {}
    for gpus in _by_kind(job, found):
        slow = outliers(_known(gpus, facts.sm_clock_mhz), SLOWER, above=False)
        for gpu in gpus:
            if key(gpu) in slow:
                mine, others = slow[key(gpu)]
                limited = (facts.throttled(gpu, "power") or 0.0) >= _CAPPED
                reason = "at its power limit, as they are" if limited else "and the driver gives no reason"
                text = (
                    f"{where(gpu)} is slow: it ran at {mine:,.0f} MHz, {1 - mine / others:.0%} below the "
                    f"{others:,.0f} of the others, {reason}"
                )
                fix = (
                    "compare the clocks that were set with `nvidia-smi -q -d CLOCK`, and tell the administrators; "
                    f"{job.without(gpu.node)}"
                )
                notes[key(gpu)] = of_gpu(gpu, WARNING, "slow_gpu", text, fix)
    return notes


def _late_data(job: Job, found: Found) -> dict[Key, Note]:
    floor = _WAIT_FLOOR * job.step_s if job.step_s else _WAIT_FLOOR_S
    return _late(job, found, lambda r: r.data_wait_s, floor, "straggler_data", _data_words)


def _data_words(job: Job, rank: RankSummary, mine: float, others: float) -> tuple[str, str]:
    text = f"waits {facts.span(mine)} a step for its data, the others {facts.span(others)}: all wait for it"
    fix = (
        f"look at what else {rank.node} does and where it reads from; more data-loader workers; "
        f"{job.without(rank.node)} if it stays so"
    )
    return text, fix


def _late_forward(job: Job, found: Found) -> dict[Key, Note]:
    floor = max(_FORWARD_FLOOR_S, _FORWARD_FLOOR * (job.step_s or 0.0))
    return _late(job, found, lambda r: r.forward_s, floor, "straggler", _forward_words)


def _forward_words(job: Job, rank: RankSummary, mine: float, others: float) -> tuple[str, str]:
    text = (
        f"needs {facts.span(mine)} for its forward passes of a step, {mine / others - 1:.0%} more than the others: "
        "all wait for it"
    )
    return text, f"{job.without(rank.node)} if it is always this rank; if it changes, the samples differ in length"


def _late(
    job: Job,
    found: Found,
    figure: Callable[[RankSummary], float | None],
    floor: float,
    code: str,
    words: Callable[[Job, RankSummary, float, float], tuple[str, str]],
) -> dict[Key, Note]:
    ranks = {r.rank: r for r in job.summary.ranks if _of_rank(r) not in found}
    figures = {n: value for n, r in ranks.items() if (value := figure(r)) is not None}
    notes = {}
    for n, (mine, others) in outliers(figures, LATER, floor=floor, above=True).items():
        text, fix = words(job, ranks[n], mine, others)
        notes[_of_rank(ranks[n])] = Note(
            severity=WARNING,
            code=code,
            text=f"rank {n} on {ranks[n].node} {text}",
            fix=fix,
            node=ranks[n].node,
            uuid=ranks[n].uuid,
            rank=n,
        )
    return notes


def _of_rank(rank: RankSummary) -> Key:
    return rank.node, rank.uuid or f"rank {rank.rank}"


def _less_busy(job: Job, found: Found) -> dict[Key, Note]:
    notes = {}
    for gpus in _by_kind(job, found):
        less = outliers(_known(gpus, facts.utilization), LESS_BUSY, floor=LESS_BUSY_BY, above=False)
        for gpu in gpus:
            if key(gpu) in less:
                mine, others = less[key(gpu)]
                text = f"{where(gpu)} was busy {mine:.0%} of the time, the others {others:.0%}: the work is not even"
                fix = "compare what its rank does with its peers': its layers, its samples, its logs"
                notes[key(gpu)] = of_gpu(gpu, WARNING, "imbalance", text, fix)
    return notes


_CAUSES: tuple[Callable[[Job, Found], dict[Key, Note]], ...] = (
    _unused,
    _throttled,
    _power_capped,
    _slow,
    _late_data,
    _less_busy,
    _late_forward,
)
