"""What a finding cost, in GPU-hours, where the summary has enough to estimate it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from clustertrain.telemetry.findings import CRITICAL, WARNING
from clustertrain.telemetry.insights.context import JobContext, gpu_key, train_clock_mhz
from clustertrain.telemetry.report_schema import GpuSummary, Insight, RankSummary

CRITICAL_SHARE = 0.1  # of the run's GPU-hours; a slow GPU or rank that costs more is critical


def add_costs(job: JobContext, insights: Sequence[Insight]) -> list[Insight]:
    """Return the insights with :attr:`Insight.gpu_hours`; a GPU or rank that costs too much becomes critical."""
    return [_with_cost(job, insight, hours) if (hours := _estimate(job, insight)) else insight for insight in insights]


def _with_cost(job: JobContext, insight: Insight, hours: float) -> Insight:
    severity = CRITICAL if _is_costly(job, insight, hours) else insight.severity
    return msgspec.structs.replace(insight, gpu_hours=hours, severity=severity)


def _is_costly(job: JobContext, insight: Insight, hours: float) -> bool:
    is_device = insight.uuid is not None or insight.rank is not None
    waste = job.summary.waste
    return insight.severity == WARNING and is_device and waste is not None and hours >= CRITICAL_SHARE * waste.gpu_hours


def _estimate(job: JobContext, insight: Insight) -> float | None:
    waste = job.summary.waste
    estimate = _ESTIMATES.get(insight.code)
    if waste is None or not waste.gpu_hours or estimate is None:
        return None
    hours = estimate(job, insight)
    return None if hours is None else round(min(hours, waste.gpu_hours), 4)


def _causes(*names: str) -> Callable[[JobContext, Insight], float | None]:
    def hours(job: JobContext, insight: Insight) -> float | None:
        return sum(job.summary.waste.by_cause.get(name, 0.0) for name in names) if job.summary.waste else None

    return hours


def _all_waste(job: JobContext, insight: Insight) -> float | None:
    return job.summary.waste.wasted_gpu_hours if job.summary.waste else None


def _one_idle_gpu(job: JobContext, insight: Insight) -> float | None:
    """Return the share of one idle GPU; the hours of all were held, so that they differ little."""
    hours = _causes("idle_gpus")(job, insight)
    return hours / len(job.idle_gpus) if hours and job.idle_gpus else None


def _slow_clock(job: JobContext, insight: Insight) -> float | None:
    """Assume that a step takes longer as the clock is lower, and that all GPUs wait for the slowest."""
    gpu = next((g for g in job.working_gpus if (g.node, g.uuid) == (insight.node, insight.uuid)), None)
    clock_mhz = train_clock_mhz(gpu) if gpu is not None else None
    if gpu is None or clock_mhz is None:
        return None
    peers_mhz = _peer_clocks(job, gpu)
    if not peers_mhz or (peer_mhz := statistics.median(peers_mhz)) <= clock_mhz:
        return None
    training_hours = _training_hours(job)
    return None if training_hours is None else training_hours * (1 - clock_mhz / peer_mhz)


def _peer_clocks(job: JobContext, gpu: GpuSummary) -> list[float]:
    peers = (g for g in job.working_gpus if gpu_key(g) != gpu_key(gpu) and g.name == gpu.name)
    return [clock for g in peers if (clock := train_clock_mhz(g)) is not None]


def _late_rank(metric: Callable[[RankSummary], float | None]) -> Callable[[JobContext, Insight], float | None]:
    """Return an estimate in which all ranks wait for this one in each step."""

    def hours(job: JobContext, insight: Insight) -> float | None:
        values = {r.rank: value for r in job.summary.ranks if (value := metric(r)) is not None}
        own = values.pop(-1 if insight.rank is None else insight.rank, None)
        training_hours = _training_hours(job)
        if own is None or not values or not job.step_s or training_hours is None:
            return None
        return training_hours * min(1.0, max(0.0, own - statistics.median(values.values())) / job.step_s)

    return hours


def _training_hours(job: JobContext) -> float | None:
    """Return the GPU-hours within steps that count."""
    share = job.share("productive_s")
    return None if share is None or job.summary.waste is None else job.summary.waste.gpu_hours * share


WAITED_FOR = frozenset({"throttled", "power_capped", "slow_gpu", "straggler", "straggler_data"})
"""Codes whose cost assumes that all GPUs waited for one."""
_ESTIMATES: dict[str, Callable[[JobContext, Insight], float | None]] = {
    "gpu_unused": _one_idle_gpu,
    "gpus_unused": _causes("idle_gpus"),
    "work_lost": _causes("repeated", "lost"),
    "gpu_hours_wasted": _all_waste,
    "throttled": _slow_clock,
    "power_capped": _slow_clock,
    "slow_gpu": _slow_clock,
    "straggler": _late_rank(lambda r: r.forward_s),
    "straggler_data": _late_rank(lambda r: r.data_wait_s),
}
