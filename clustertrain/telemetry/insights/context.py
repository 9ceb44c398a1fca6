"""What the rules share: the figures of a job in the form in which they are compared, and words for its parts."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from clustertrain.run import events
from clustertrain.telemetry.report_schema import GpuSummary, InPhase, Note, RankSummary, Stats, Summary

CRITICAL, WARNING, INFO = "critical", "warning", "info"

SETTLED_SAMPLES = 60  # before that many, a low mean may be nothing but the start
SHORT_S = 600.0  # a job of less is mostly start-up, whatever it does then
_USED = 0.01  # utilization below which a GPU counts as idle: a driver's own work shows as some per mille

K = TypeVar("K", bound=Hashable)
Key = tuple[str, str]  # node and UUID: of a container, or by mistake, two nodes may name the same


class Job:
    """A summary and its events, with what several rules need. Figures of a GPU are those of the time in which its rank
    trained where ranks told of it, else of all samples."""

    def __init__(self, summary: Summary, log: Iterable[events.Event]) -> None:
        self.summary = summary
        self.log = list(log)

    @cached_property
    def lost(self) -> dict[Key, str]:
        """GPUs that fell off the bus, and the driver's words: from the events or from the samples' reasons, since
        either may be all that a dying node left behind."""
        told = {str(e.get("uuid")): str(e.get("reason")) for e in events.named(self.log, "gpu_lost")}
        found = {}
        for gpu in self.summary.gpus:
            reasons = [r for r in gpu.nulls.values() if r.startswith(("GPU_IS_LOST", "RESET_REQUIRED"))]
            if not told.get(gpu.uuid, "NOT_FOUND").startswith("NOT_FOUND"):
                reasons.insert(0, told[gpu.uuid])
            if reasons:
                found[key(gpu)] = reasons[0]
        return found

    @cached_property
    def idle(self) -> list[GpuSummary]:
        """Allocated, there, and never at work."""
        return [g for g in self.summary.gpus if key(g) not in self.lost and is_idle(g)]

    @cached_property
    def working(self) -> list[GpuSummary]:
        """Those whose speed can be judged."""
        idle = {key(g) for g in self.idle}
        return [g for g in self.summary.gpus if key(g) not in idle and key(g) not in self.lost and busy(g) is not None]

    @cached_property
    def began(self) -> bool:
        """Whether training has begun, as far as anybody told."""
        training = self.summary.training
        return bool(training and training.steps) or any("train" in g.phases for g in self.summary.gpus)

    @cached_property
    def ranks(self) -> dict[Key, list[RankSummary]]:
        found: dict[Key, list[RankSummary]] = {}
        for rank in self.summary.ranks:
            if rank.uuid is not None:
                found.setdefault((rank.node, rank.uuid), []).append(rank)
        return found

    @cached_property
    def allocated_s(self) -> float | None:
        """Seconds in which the job had its nodes."""
        goodput = self.summary.goodput
        if goodput is not None:
            return max(0.0, goodput.wall_s - goodput.queue_s)
        spans = [(a.window.start, a.window.end) for a in self.summary.attempts]
        known = [end - start for start, end in spans if start is not None and end is not None]
        return sum(known) if known else None

    def share(self, *parts: str) -> float | None:
        """Of the allocated time, over parts of the goodput ledger."""
        if self.summary.goodput is None or not self.allocated_s:
            return None
        return float(sum(getattr(self.summary.goodput, part) for part in parts)) / self.allocated_s

    @cached_property
    def short(self) -> bool:
        return self.allocated_s is None or self.allocated_s < SHORT_S

    @cached_property
    def step_s(self) -> float | None:
        """A typical step's seconds."""
        training = self.summary.training
        return training.step_s.p50 if training is not None and training.step_s is not None else None

    def without(self, node: str) -> str:
        """The command that goes on without a node, or begins without it next time."""
        if self.summary.state in ("completed", "cancelled"):
            return f"`clustertrain submit --exclude {node}` leaves the node out next time"
        return f"`clustertrain requeue {self.summary.run} --exclude {node}` goes on without the node"


def key(gpu: GpuSummary) -> Key:
    return gpu.node, gpu.uuid


def where(gpu: GpuSummary) -> str:
    return f"GPU {gpu.uuid if gpu.index is None else gpu.index} of {gpu.node}"


def rank_of(gpu: GpuSummary) -> int | None:
    return gpu.ranks[0] if len(gpu.ranks) == 1 else None


def of_gpu(gpu: GpuSummary, severity: str, code: str, text: str, fix: str | None) -> Note:
    return Note(severity=severity, code=code, text=text, fix=fix, node=gpu.node, uuid=gpu.uuid, rank=rank_of(gpu))


def busy(gpu: GpuSummary) -> Stats | None:
    """Utilization; of a MIG slice, which has none, the share of its multiprocessors that were active."""
    return gpu.utilization or gpu.sm_activity


def is_idle(gpu: GpuSummary) -> bool:
    use = busy(gpu)
    return use is not None and (use.max == 0 or (use.mean < _USED and use.p95 < _USED))


def training(gpu: GpuSummary) -> InPhase | None:
    return gpu.phases.get("train")


def utilization(gpu: GpuSummary) -> float | None:
    use, phase = busy(gpu), training(gpu)
    if phase is not None and phase.utilization is not None:
        return phase.utilization
    return None if use is None else use.mean


def sm_clock_mhz(gpu: GpuSummary) -> float | None:
    """Of a job without phases the median: its mean would tell how long the start took."""
    phase = training(gpu)
    if gpu.phases:
        return None if phase is None else phase.sm_clock_mhz
    return None if gpu.sm_clock_mhz is None else gpu.sm_clock_mhz.p50


def throttled(gpu: GpuSummary, cause: str) -> float | None:
    """The share of the training in which ``cause`` held the clock down; where only the whole job's is known, as if it
    had been so while training only."""
    phase = training(gpu)
    if phase is not None and (share := getattr(phase.throttled, cause)) is not None:
        return float(share)
    whole = getattr(gpu.throttled, cause)
    if whole is None:
        return None
    return min(1.0, whole / phase.share) if phase is not None and phase.share else float(whole)


def mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def span(seconds: float) -> str:
    """``412 ms`` or ``2.35 s``."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


class Outlier(NamedTuple):
    value: float
    others: float  # their median


FEW = 4  # members below which one of them may differ twice as much: there is no telling what is usual
_SIGMAS, _SIGMA_OF_MAD, _SPREAD_FROM = 4.0, 1.4826, 5


def outliers(figures: Mapping[K, float], margin: float, *, floor: float = 0.0, above: bool) -> dict[K, Outlier]:
    """Those that lie above (or below) the median of all others by ``margin`` of it, by ``floor``, and by four standard
    deviations as the median absolute deviation estimates them, which an outlier itself hardly moves.

    Two or three members are compared with twice the margin.
    """
    if len(figures) < 2:
        return {}
    ordered = sorted(figures.values())
    spread = 0.0
    if len(ordered) >= _SPREAD_FROM:
        middle = statistics.median(ordered)
        spread = _SIGMAS * _SIGMA_OF_MAD * statistics.median(abs(v - middle) for v in ordered)
    found = {}
    for name, value in figures.items():
        others = _median_without(ordered, value)
        limit = max(margin * abs(others) * (2 if len(ordered) < FEW else 1), floor, spread)
        if limit > 0 and (value - others if above else others - value) >= limit:
            found[name] = Outlier(value, others)
    return found


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all but one ``value``; ``ordered`` is sorted."""
    at, left = bisect.bisect_left(ordered, value), len(ordered) - 1

    def nth(i: int) -> float:
        return ordered[i if i < at else i + 1]

    return (nth((left - 1) // 2) + nth(left // 2)) / 2
