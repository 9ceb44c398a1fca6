"""Shared context of the rules: comparable metrics of a job, and labels for its parts."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from clustertrain.run import events
from clustertrain.telemetry import findings
from clustertrain.telemetry.report_schema import GpuSummary, Insight, PhaseStats, RankSummary, Stats, Summary

SETTLED_SAMPLES = 60  # before, a low mean may only reflect the start
SHORT_S = 600.0  # a shorter job is mostly start-up
_IDLE_UTILIZATION = 0.01  # below it a GPU counts as idle: the driver's work causes a utilization of about 0.001

K = TypeVar("K", bound=Hashable)
GpuKey = tuple[str, str]  # node and UUID; in containers or by mistake, two nodes may list the same UUID


class JobContext:
    """A summary and its events, with values that several rules use.

    Metrics of a GPU cover the time in which its rank trained, or all samples without heartbeats.
    """

    def __init__(self, summary: Summary, log: Iterable[events.Event]) -> None:
        self.summary = summary
        self.log = list(log)

    @cached_property
    def lost_gpus(self) -> dict[GpuKey, str]:
        """Lost GPUs with the driver's reason, from events or samples: a dying node may leave only one of them."""
        lost_reasons = {str(e.get("uuid")): str(e.get("reason")) for e in events.filter_by_name(self.log, "gpu_lost")}
        lost = {}
        for gpu in self.summary.gpus:
            reasons = [r for r in gpu.missing.values() if r.startswith(("GPU_IS_LOST", "RESET_REQUIRED"))]
            if not lost_reasons.get(gpu.uuid, "NOT_FOUND").startswith("NOT_FOUND"):
                reasons.insert(0, lost_reasons[gpu.uuid])
            if reasons:
                lost[gpu_key(gpu)] = reasons[0]
        return lost

    @cached_property
    def idle_gpus(self) -> list[GpuSummary]:
        """Allocated and visible GPUs that were never used."""
        return [g for g in self.summary.gpus if gpu_key(g) not in self.lost_gpus and is_idle(g)]

    @cached_property
    def working_gpus(self) -> list[GpuSummary]:
        """GPUs whose speed can be judged."""
        idle_keys = {gpu_key(g) for g in self.idle_gpus}
        return [
            g
            for g in self.summary.gpus
            if gpu_key(g) not in idle_keys and gpu_key(g) not in self.lost_gpus and utilization_stats(g) is not None
        ]

    @cached_property
    def training_began(self) -> bool:
        """Whether training has begun, according to metrics or heartbeats."""
        training = self.summary.training
        return bool(training and training.steps) or any("train" in g.phases for g in self.summary.gpus)

    @cached_property
    def ranks_by_gpu(self) -> dict[GpuKey, list[RankSummary]]:
        ranks: dict[GpuKey, list[RankSummary]] = {}
        for rank in self.summary.ranks:
            if rank.uuid is not None:
                ranks.setdefault((rank.node, rank.uuid), []).append(rank)
        return ranks

    @cached_property
    def allocated_s(self) -> float | None:
        """Seconds for which the job held its nodes."""
        goodput = self.summary.goodput
        if goodput is not None:
            return max(0.0, goodput.wall_s - goodput.queue_s)
        spans = [(a.window.start, a.window.end) for a in self.summary.attempts]
        durations = [end - start for start, end in spans if start is not None and end is not None]
        return sum(durations) if durations else None

    def share(self, *components: str) -> float | None:
        """Return the share of the allocated time of some components of the goodput ledger."""
        if self.summary.goodput is None or not self.allocated_s:
            return None
        return float(sum(getattr(self.summary.goodput, component) for component in components)) / self.allocated_s

    @cached_property
    def is_short(self) -> bool:
        return self.allocated_s is None or self.allocated_s < SHORT_S

    @cached_property
    def step_s(self) -> float | None:
        """Median step time in seconds."""
        training = self.summary.training
        return training.step_s.p50 if training is not None and training.step_s is not None else None

    def exclude_hint(self, node: str) -> str:
        """Return a hint with the command to continue, or to start the next run, without a node."""
        if self.summary.state in ("completed", "cancelled"):
            return f"`clustertrain submit --exclude {node}` leaves the node out next time"
        return f"`clustertrain requeue {self.summary.run} --exclude {node}` continues without the node"


def gpu_key(gpu: GpuSummary) -> GpuKey:
    return gpu.node, gpu.uuid


def gpu_label(gpu: GpuSummary) -> str:
    return f"{findings.gpu_label(gpu.index, gpu.uuid)} of {gpu.node}"


def rank_of(gpu: GpuSummary) -> int | None:
    return gpu.ranks[0] if len(gpu.ranks) == 1 else None


def gpu_insight(gpu: GpuSummary, severity: str, code: str, text: str, fix: str | None) -> Insight:
    return Insight(severity=severity, code=code, text=text, fix=fix, node=gpu.node, uuid=gpu.uuid, rank=rank_of(gpu))


def utilization_stats(gpu: GpuSummary) -> Stats | None:
    """Return the utilization, or the SM activity of a MIG slice, which has no utilization."""
    return gpu.utilization or gpu.sm_activity


def is_idle(gpu: GpuSummary) -> bool:
    stats = utilization_stats(gpu)
    return stats is not None and (stats.max == 0 or (stats.mean < _IDLE_UTILIZATION and stats.p95 < _IDLE_UTILIZATION))


def train_phase(gpu: GpuSummary) -> PhaseStats | None:
    return gpu.phases.get("train")


def train_utilization(gpu: GpuSummary) -> float | None:
    stats, phase = utilization_stats(gpu), train_phase(gpu)
    if phase is not None and phase.utilization is not None:
        return phase.utilization
    return None if stats is None else stats.mean


def train_clock_mhz(gpu: GpuSummary) -> float | None:
    """Return the mean clock in training; without phases the median, because start-up distorts the mean."""
    phase = train_phase(gpu)
    if gpu.phases:
        return None if phase is None else phase.sm_clock_mhz
    return None if gpu.sm_clock_mhz is None else gpu.sm_clock_mhz.p50


def throttled_share(gpu: GpuSummary, cause: str) -> float | None:
    """Return the share of the training time in which ``cause`` throttled the clock.

    If only the share of the whole job is known, all throttling is attributed to training.
    """
    phase = train_phase(gpu)
    if phase is not None and (share := getattr(phase.throttle_ratio, cause)) is not None:
        return float(share)
    job_share = getattr(gpu.throttle_ratio, cause)
    if job_share is None:
        return None
    return min(1.0, job_share / phase.share) if phase is not None and phase.share else float(job_share)


def mean_known(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def pluralize(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_seconds(seconds: float) -> str:
    """Format seconds as ``412 ms`` or ``2.35 s``."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


class Outlier(NamedTuple):
    """Value that differs from its peers."""

    value: float
    peer_median: float


MIN_GROUP_SIZE = 4  # in smaller groups the margin is doubled because the typical value is uncertain
_NUM_SIGMAS, _SIGMA_OF_MAD, _MIN_SPREAD_GROUP = 4.0, 1.4826, 5


def outliers(values: Mapping[K, float], margin: float, *, floor: float = 0.0, above: bool) -> dict[K, Outlier]:
    """Return the values above (or below) the median of all others by ``margin`` of it, ``floor`` and four sigmas.

    Sigma is estimated by the median absolute deviation, which an outlier hardly affects, and counts from five values
    on. In groups of two or three the margin is doubled.
    """
    if len(values) < 2:
        return {}
    ordered = sorted(values.values())
    spread = 0.0
    if len(ordered) >= _MIN_SPREAD_GROUP:
        median = statistics.median(ordered)
        spread = _NUM_SIGMAS * _SIGMA_OF_MAD * statistics.median(abs(v - median) for v in ordered)
    result = {}
    for name, value in values.items():
        peer_median = _median_without(ordered, value)
        limit = max(margin * abs(peer_median) * (2 if len(ordered) < MIN_GROUP_SIZE else 1), floor, spread)
        if limit > 0 and (value - peer_median if above else peer_median - value) >= limit:
            result[name] = Outlier(value, peer_median)
    return result


def _median_without(ordered: Sequence[float], excluded: float) -> float:
    """Return the median of the sorted values without one occurrence of ``excluded``."""
    excluded_index, num_left = bisect.bisect_left(ordered, excluded), len(ordered) - 1

    def nth(i: int) -> float:
        return ordered[i if i < excluded_index else i + 1]

    return (nth((num_left - 1) // 2) + nth(num_left // 2)) / 2
