"""Insights on GPUs and ranks that differ from the others: each is reported once, with one cause."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping

from clustertrain.telemetry.findings import CRITICAL, INFO, WARNING
from clustertrain.telemetry.insights.context import (
    SETTLED_SAMPLES,
    GpuKey,
    JobContext,
    format_seconds,
    gpu_insight,
    gpu_key,
    gpu_label,
    outliers,
    rank_of,
    throttled_share,
    train_clock_mhz,
    train_utilization,
    utilization_stats,
)
from clustertrain.telemetry.report_schema import GpuSummary, Insight, RankSummary

THROTTLED = 0.05  # of the training time
SLOW_MARGIN = 0.05  # of the others' clock
LESS_BUSY_MARGIN, LESS_BUSY_FLOOR = 0.2, 0.15  # of the others' utilization, and at least this share of the time
LATE_MARGIN = 0.15  # of the others' forward pass or wait for data
_FORWARD_FLOOR = _WAIT_FLOOR = 0.05  # of a step; shorter delays do not matter
_FORWARD_FLOOR_S = 0.001
_WAIT_FLOOR_S = 0.01  # if the step time is unknown
_POWER_CAPPED = 0.5  # of the training time

Explained = Mapping[GpuKey, Insight]
GpuModel = tuple[str | None, bool]  # the name, and whether it is a MIG slice


def explain_outliers(job: JobContext) -> dict[GpuKey, Insight]:
    """Return one insight for each GPU that differs from the others.

    The first rule that explains a GPU excludes it from the later ones: a throttled GPU, its low clock and its late rank
    give a single insight.
    """
    explained: dict[GpuKey, Insight] = {}
    for rule in _RULES:
        explained.update({k: insight for k, insight in rule(job, explained).items() if k not in explained})
    return explained


def gpu_outliers(job: JobContext) -> Iterable[Insight]:
    """Return the insights of :func:`explain_outliers`, and one if several GPUs were not used."""
    explained = explain_outliers(job)
    unused = [n for n in explained.values() if n.code == "gpu_unused"]
    if len(unused) > 1:
        text = f"the job did not use {len(unused):,} of {len(job.summary.gpus):,} allocated GPUs"
        fix = "request fewer GPUs, or start a rank for each: the number of ranks is --nodes times --gpus"
        yield Insight(severity=CRITICAL, code="gpus_unused", text=text, fix=fix)
    yield from explained.values()


def _unused(job: JobContext, explained: Explained) -> dict[GpuKey, Insight]:
    return {gpu_key(gpu): _unused_note(job, gpu) for gpu in job.idle_gpus}


def _unused_note(job: JobContext, gpu: GpuSummary) -> Insight:
    utilization, memory, rank = utilization_stats(gpu), gpu.memory_used_gib, rank_of(gpu)
    if gpu.samples < SETTLED_SAMPLES and not job.training_began:
        return gpu_insight(gpu, INFO, "gpu_unused_yet", f"{gpu_label(gpu)} has not been used yet", None)
    idle_text = (
        "stayed at 0" if utilization is None or utilization.max == 0 else f"was {utilization.mean:.1%} on average"
    )
    memory_text = ""
    if memory is not None and memory.max >= 1.0:
        memory_text = f", although {memory.max:.1f} GiB of its memory were in use: its rank computes elsewhere or hangs"
    text = f"{gpu_label(gpu)} was not used: its utilization {idle_text}{memory_text}"
    fix = "request fewer GPUs"
    if rank is not None:
        fix = f"check `clustertrain logs {job.summary.run} --rank {rank}` for what its rank does; or request fewer GPUs"
    return gpu_insight(gpu, CRITICAL, "gpu_unused", text, fix)


def _throttled(job: JobContext, explained: Explained) -> dict[GpuKey, Insight]:
    """Report throttled GPUs, including lost ones, because heat may be the cause of the loss."""
    insights = {}
    clocks = {
        _gpu_model(gpus[0]): _values_by_gpu(gpus, train_clock_mhz) for gpus in _unexplained_by_model(job, explained)
    }
    lost_gpus = [g for g in job.summary.gpus if gpu_key(g) in job.lost_gpus and utilization_stats(g) is not None]
    for gpu in [*job.working_gpus, *lost_gpus]:
        shares = [(throttled_share(gpu, cause) or 0.0, cause) for cause in ("thermal", "hardware")]
        share, cause = max(shares)
        if share < THROTTLED:
            continue
        reason = "heat" if cause == "thermal" else "its board or power supply (hardware slowdown)"
        temperature = gpu.temperature_c
        peak_text = f"; it reached {temperature.max:.0f} °C" if temperature is not None and cause == "thermal" else ""
        text = f"{gpu_label(gpu)} throttles: {reason} lowered its clock for {share:.0%} of the training"
        text += _clock_text(gpu, clocks.get(_gpu_model(gpu), {}))
        component = "the cooling of the node" if cause == "thermal" else "power cables and power brake of the node"
        fix = f"{job.exclude_hint(gpu.node)}; ask the administrators to check {component}"
        insights[gpu_key(gpu)] = gpu_insight(gpu, WARNING, "throttled", text + peak_text, fix)
    return insights


def _clock_text(gpu: GpuSummary, clocks: Mapping[GpuKey, float]) -> str:
    """Return a phrase that compares its clock with the others of its model."""
    clock_mhz = train_clock_mhz(gpu)
    if clock_mhz is None:
        return ""
    peer_clocks = [clock for peer, clock in clocks.items() if peer != gpu_key(gpu)]
    peer_median = statistics.median(peer_clocks) if peer_clocks else None
    return f", to {clock_mhz:,.0f} MHz" + (
        f" while the others run at {peer_median:,.0f}" if peer_median and peer_median > clock_mhz else ""
    )


def _gpu_model(gpu: GpuSummary) -> GpuModel:
    return gpu.name, gpu.parent is not None


def _unexplained_by_model(job: JobContext, explained: Explained) -> list[list[GpuSummary]]:
    groups: dict[GpuModel, list[GpuSummary]] = {}
    for gpu in job.working_gpus:
        if gpu_key(gpu) not in explained:
            groups.setdefault(_gpu_model(gpu), []).append(gpu)
    return list(groups.values())


def _power_capped(job: JobContext, explained: Explained) -> dict[GpuKey, Insight]:
    """Report GPUs throttled by their power limit while the others are not; all being throttled is normal."""
    insights = {}
    for gpus in _unexplained_by_model(job, explained):
        slow = outliers(_values_by_gpu(gpus, train_clock_mhz), SLOW_MARGIN, above=False)
        capped = {gpu_key(g): s for g in gpus if (s := throttled_share(g, "power")) is not None}
        capped_outliers = outliers(capped, 0.0, floor=_POWER_CAPPED, above=True)
        for gpu in gpus:
            if gpu_key(gpu) in slow and gpu_key(gpu) in capped_outliers:
                clock_mhz, peer_mhz = slow[gpu_key(gpu)]
                text = (
                    f"{gpu_label(gpu)} is throttled by its power limit for {capped[gpu_key(gpu)]:.0%} of the training,"
                    f" the others for {capped_outliers[gpu_key(gpu)].peer_median:.0%}: {clock_mhz:,.0f} MHz while they"
                    f" run at {peer_mhz:,.0f}"
                )
                fix = f"compare the limits with `nvidia-smi -q -d POWER`; {job.exclude_hint(gpu.node)}"
                insights[gpu_key(gpu)] = gpu_insight(gpu, WARNING, "power_capped", text, fix)
    return insights


def _values_by_gpu(gpus: Iterable[GpuSummary], metric: Callable[[GpuSummary], float | None]) -> dict[GpuKey, float]:
    return {gpu_key(g): value for g in gpus if (value := metric(g)) is not None}


def _slow_clock(job: JobContext, explained: Explained) -> dict[GpuKey, Insight]:
    insights = {}
    for gpus in _unexplained_by_model(job, explained):
        slow = outliers(_values_by_gpu(gpus, train_clock_mhz), SLOW_MARGIN, above=False)
        for gpu in gpus:
            if gpu_key(gpu) in slow:
                clock_mhz, peer_mhz = slow[gpu_key(gpu)]
                at_power_limit = (throttled_share(gpu, "power") or 0.0) >= _POWER_CAPPED
                reason = "at its power limit, like them" if at_power_limit else "and the driver reports no reason"
                text = (
                    f"{gpu_label(gpu)} is slow: it ran at {clock_mhz:,.0f} MHz, {1 - clock_mhz / peer_mhz:.0%} below"
                    f" the {peer_mhz:,.0f} of the others, {reason}"
                )
                fix = (
                    "compare the configured clocks with `nvidia-smi -q -d CLOCK`, and notify the administrators; "
                    f"{job.exclude_hint(gpu.node)}"
                )
                insights[gpu_key(gpu)] = gpu_insight(gpu, WARNING, "slow_gpu", text, fix)
    return insights


def _data_stragglers(job: JobContext, explained: Explained) -> dict[GpuKey, Insight]:
    floor = _WAIT_FLOOR * job.step_s if job.step_s else _WAIT_FLOOR_S
    return _stragglers(job, explained, lambda r: r.data_wait_s, floor, "straggler_data", _describe_data_wait)


def _describe_data_wait(job: JobContext, rank: RankSummary, wait_s: float, peer_wait_s: float) -> tuple[str, str]:
    text = (
        f"waits {format_seconds(wait_s)} per step for data, the others {format_seconds(peer_wait_s)}: all wait for it"
    )
    fix = (
        f"check the load and the storage of {rank.node}; use more data-loader workers; "
        f"{job.exclude_hint(rank.node)} if it persists"
    )
    return text, fix


def _forward_stragglers(job: JobContext, explained: Explained) -> dict[GpuKey, Insight]:
    floor = max(_FORWARD_FLOOR_S, _FORWARD_FLOOR * (job.step_s or 0.0))
    return _stragglers(job, explained, lambda r: r.forward_s, floor, "straggler", _describe_forward)


def _describe_forward(job: JobContext, rank: RankSummary, forward_s: float, peer_forward_s: float) -> tuple[str, str]:
    text = (
        f"needs {format_seconds(forward_s)} per step for forward passes, {forward_s / peer_forward_s - 1:.0%}"
        " more than the others: all wait for it"
    )
    return (
        text,
        f"{job.exclude_hint(rank.node)} if it is always this rank; if the rank changes, samples differ in length",
    )


def _stragglers(
    job: JobContext,
    explained: Explained,
    metric: Callable[[RankSummary], float | None],
    floor: float,
    code: str,
    describe: Callable[[JobContext, RankSummary, float, float], tuple[str, str]],
) -> dict[GpuKey, Insight]:
    ranks = {r.rank: r for r in job.summary.ranks if _rank_key(r) not in explained}
    values = {rank: value for rank, r in ranks.items() if (value := metric(r)) is not None}
    insights = {}
    for n, (value_s, peer_s) in outliers(values, LATE_MARGIN, floor=floor, above=True).items():
        text, fix = describe(job, ranks[n], value_s, peer_s)
        insights[_rank_key(ranks[n])] = Insight(
            severity=WARNING,
            code=code,
            text=f"rank {n} on {ranks[n].node} {text}",
            fix=fix,
            node=ranks[n].node,
            uuid=ranks[n].uuid,
            rank=n,
        )
    return insights


def _rank_key(rank: RankSummary) -> GpuKey:
    return rank.node, rank.uuid or f"rank {rank.rank}"


def _imbalanced(job: JobContext, explained: Explained) -> dict[GpuKey, Insight]:
    insights = {}
    for gpus in _unexplained_by_model(job, explained):
        less_busy = outliers(
            _values_by_gpu(gpus, train_utilization), LESS_BUSY_MARGIN, floor=LESS_BUSY_FLOOR, above=False
        )
        for gpu in gpus:
            if gpu_key(gpu) in less_busy:
                utilization, peer_utilization = less_busy[gpu_key(gpu)]
                text = (
                    f"{gpu_label(gpu)} was busy {utilization:.0%} of the time, the others {peer_utilization:.0%}: the"
                    " work is unevenly distributed"
                )
                fix = "compare its rank with the others: layers, samples, logs"
                insights[gpu_key(gpu)] = gpu_insight(gpu, WARNING, "imbalance", text, fix)
    return insights


_RULES: tuple[Callable[[JobContext, Explained], dict[GpuKey, Insight]], ...] = (
    _unused,
    _throttled,
    _power_capped,
    _slow_clock,
    _data_stragglers,
    _imbalanced,
    _forward_stragglers,
)
