"""Sliding windows over the last minutes of a node, in buckets of ten seconds, for the rules in :mod:`.rules`.

Plain floats: a tick adds a few dozen of them, for which numpy would be slower.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from clustertrain.run import heartbeat
from clustertrain.telemetry import findings
from clustertrain.telemetry.fields import column_name
from clustertrain.telemetry.store.writer import GpuFacts

BUCKET_S = 10.0
WINDOW_BUCKETS = 60  # ten minutes
WARMUP_S = 180.0  # of training
RECENT_BUCKETS = 30  # the five minutes used for comparisons

_BIN_LOG_WIDTH = math.log(1.02)


def finite_or_none(value: float | None) -> float | None:
    """Return the value, or None if it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(slots=True)
class GpuBucket:
    """Sums of one GPU over one bucket. ``*known*`` fields are the seconds for which the value was known."""

    busy_known: float = 0.0
    busy_s: float = 0.0
    max_memory_bytes: float = 0.0
    throttle_known_s: float = 0.0
    thermal_s: float = 0.0
    hardware_s: float = 0.0
    clock_known_s: float = 0.0  # only while the GPU's rank trained
    clock_mhz_s: float = 0.0  # clock x seconds
    train_busy_known_s: float = 0.0  # only in training, after the first minutes, which compile kernels
    train_busy_s: float = 0.0
    power_known_s: float = 0.0
    energy_j: float = 0.0


class GpuWindow:
    """Window of one GPU. Column names are built once because building them would dominate a tick."""

    def __init__(self, index: int, facts: GpuFacts) -> None:
        self.facts = facts
        self.rank = facts.ranks[0] if facts.ranks else None
        self.idle_s = 0.0
        self.train_power = (0.0, 0.0)  # seconds and joules over the whole attempt, while training
        self.bucket = GpuBucket()
        self.history: deque[GpuBucket] = deque(maxlen=WINDOW_BUCKETS)
        self.device = device = f"gpu{index}"
        self._util, self._memory = column_name(device, "utilization"), column_name(device, "memory_used_bytes")
        self._thermal, self._hardware = (
            column_name(device, "throttle_thermal"),
            column_name(device, "throttle_hardware"),
        )
        self._clock, self._power = column_name(device, "sm_clock_mhz"), column_name(device, "power_w")
        self.uncorrected = column_name(device, "ecc_uncorrected")
        self.remap_failed, self.remap_pending = (
            column_name(device, "remap_failed"),
            column_name(device, "remap_pending"),
        )

    @property
    def label(self) -> str:
        return findings.gpu_label(self.facts.index, self.facts.uuid)

    def add(self, values: Mapping[str, float], dt: float, training: bool, warmed_up: bool) -> None:
        """Add a sample that stands for ``dt`` seconds; ``warmed_up``: the first minutes of training are over."""
        bucket = self.bucket
        busy = finite_or_none(values.get(self._util))
        if busy is not None:
            bucket.busy_known += dt
            bucket.busy_s += busy * dt
            if training and warmed_up:
                bucket.train_busy_known_s += dt
                bucket.train_busy_s += busy * dt
        memory = finite_or_none(values.get(self._memory))
        if memory is not None and memory > bucket.max_memory_bytes:
            bucket.max_memory_bytes = memory
        thermal, hardware = finite_or_none(values.get(self._thermal)), finite_or_none(values.get(self._hardware))
        if thermal is not None or hardware is not None:
            bucket.throttle_known_s += dt
            bucket.thermal_s += dt if thermal else 0.0
            bucket.hardware_s += dt if hardware else 0.0
        power = finite_or_none(values.get(self._power))
        if power is not None:
            bucket.power_known_s += dt
            bucket.energy_j += power * dt
        if training:
            clock = finite_or_none(values.get(self._clock))
            if clock is not None:
                bucket.clock_known_s += dt
                bucket.clock_mhz_s += clock * dt

    def close(self) -> GpuBucket:
        """End the open bucket, return it and begin another."""
        closed, self.bucket = self.bucket, GpuBucket()
        self.history.append(closed)
        if closed.clock_known_s >= BUCKET_S / 2 and closed.power_known_s:
            seconds, joules = self.train_power
            self.train_power = seconds + closed.power_known_s, joules + closed.energy_j
        return closed

    def clock_mhz(self, min_s: float) -> float | None:
        """Return the mean clock in training over the recent buckets; None if known for less than ``min_s``."""
        known_s = clock = 0.0
        for b in _recent_buckets(self.history):
            known_s += b.clock_known_s
            clock += b.clock_mhz_s
        return clock / known_s if known_s >= min_s else None

    def utilization(self, min_s: float) -> float | None:
        """Return the mean utilization in training over the recent buckets; None if known for less than ``min_s``."""
        known_s = busy_s = 0.0
        for b in _recent_buckets(self.history):
            known_s += b.train_busy_known_s
            busy_s += b.train_busy_s
        return busy_s / known_s if known_s >= min_s else None

    def throttled_s(self) -> tuple[float, float]:
        """Return the seconds throttled by heat and by hardware in the last ten minutes."""
        thermal = hardware = 0.0
        for b in self.history:
            thermal += b.thermal_s
            hardware += b.hardware_s
        return thermal, hardware

    def is_spinning(self) -> bool:
        """Return whether the GPU is busy at low power: it waits in a collective, whose kernel polls."""
        seconds, joules = self.train_power
        if not self.history or not seconds:
            return False
        b = self.history[-1]
        if not b.busy_known or not b.power_known_s or b.busy_s / b.busy_known < 0.95:
            return False
        return b.energy_j / b.power_known_s < 0.6 * joules / seconds


def _recent_buckets(past: deque[GpuBucket]) -> list[GpuBucket]:
    return list(past)[-RECENT_BUCKETS:]


@dataclass(frozen=True, slots=True)
class RankSample:
    step: float
    data_wait_s: float | None
    forward_s: float | None
    train_s: float


class RankWindow:
    """Window of one rank. ``train_s`` counts its seconds of training."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.phase: int | None = None
        self.step: float | None = None
        self.train_s = 0.0
        self.has_trained = False  # in any sample so far
        self.samples: deque[RankSample] = deque(maxlen=RECENT_BUCKETS + 1)
        device = f"rank{rank}"
        self._step, self._phase = column_name(device, "step"), column_name(device, "phase")
        self._data_wait, self._forward = column_name(device, "data_wait_s"), column_name(device, "forward_s")

    @property
    def is_training(self) -> bool:
        return self.phase == heartbeat.TRAIN

    @property
    def is_warmed_up(self) -> bool:
        """Whether the first minutes, which compile kernels and fill caches, are over."""
        return self.train_s >= WARMUP_S

    def add(self, values: Mapping[str, float], dt: float) -> bool:
        """Add a sample that stands for ``dt`` seconds; return whether the step advanced."""
        phase = finite_or_none(values.get(self._phase))
        self.phase = None if phase is None else int(phase)
        if self.is_training:
            self.has_trained = True
            self.train_s += dt
        step = finite_or_none(values.get(self._step))
        if step is None or step == self.step:
            return False
        self.step = step
        return True

    def close(self, values: Mapping[str, float]) -> None:
        if self.step is None or not self.is_training:
            return
        if self.samples and self.step < self.samples[-1].step:  # the process restarted
            self.samples.clear()
        data_wait, forward = finite_or_none(values.get(self._data_wait)), finite_or_none(values.get(self._forward))
        self.samples.append(RankSample(self.step, data_wait, forward, self.train_s))

    def per_step(self, counter: str, min_s: float) -> float | None:
        """Return the increase per step of ``data_wait_s``, ``forward_s`` or ``train_s`` over the recent samples."""
        if len(self.samples) < 2:
            return None
        first, last = self.samples[0], self.samples[-1]
        start, end, steps = getattr(first, counter), getattr(last, counter), last.step - first.step
        if start is None or end is None or end < start or steps <= 0 or last.train_s - first.train_s < min_s:
            return None
        return float((end - start) / steps)


class StepTimes:
    """Step time over the last minutes of training, and its median over the attempt.

    Only training time counts, so checkpoints and evaluations do not slow a step. The first minutes count only in
    :meth:`early`.
    """

    RECENT_S, RECENT_STEPS, MIN_S, MIN_STEPS = 300.0, 10, 600.0, 20
    MIN_EARLY = 3  # advances; two of them may belong to the first step

    def __init__(self) -> None:
        self._early: list[float] = []  # seconds per step at each advance of the first minutes
        self._last_advance: tuple[float, float] | None = None  # training seconds and step of the last advance
        self._samples: deque[tuple[float, float]] = deque()
        self._bins: dict[int, float] = {}
        self._seconds = self._steps = 0.0

    def add(self, train_s: float, step: float) -> None:
        """Record an advance of the step; cheap."""
        if train_s < WARMUP_S or len(self._early) < self.MIN_EARLY:
            previous_s, previous_step = self._last_advance or (0.0, step - 1)
            self._early.append((train_s - previous_s) / max(1.0, step - previous_step))
        self._last_advance = train_s, step

    def close(self) -> None:
        """Update the window and the median, every ten seconds."""
        current = self._last_advance
        if current is None or current[0] < WARMUP_S or (self._samples and current[1] == self._samples[-1][1]):
            return
        if self._samples and current[1] < self._samples[-1][1]:
            self._samples.clear()
        if self._samples:
            seconds, steps = current[0] - self._samples[-1][0], current[1] - self._samples[-1][1]
            if seconds > 0:
                self._add_to_histogram(seconds / steps, seconds, steps)
        self._samples.append(current)
        while len(self._samples) > 2 and self._spans_window(self._samples[1]):
            self._samples.popleft()

    def _add_to_histogram(self, step_s: float, seconds: float, steps: float) -> None:
        index = round(math.log(step_s) / _BIN_LOG_WIDTH)
        self._bins[index] = self._bins.get(index, 0.0) + steps
        self._seconds += seconds
        self._steps += steps

    def _spans_window(self, sample: tuple[float, float]) -> bool:
        last = self._samples[-1]
        return last[0] - sample[0] >= self.RECENT_S and last[1] - sample[1] >= self.RECENT_STEPS

    def recent(self) -> float | None:
        """Return the seconds per step over at least five minutes of training and ten steps; None until then."""
        if not self._samples or not self._spans_window(self._samples[0]):
            return None
        first, last = self._samples[0], self._samples[-1]
        return (last[0] - first[0]) / (last[1] - first[1])

    def early(self) -> tuple[float, float] | None:
        """Return the median and the longest step time of the first minutes; None before enough steps."""
        if len(self._early) < self.MIN_EARLY:
            return None
        return statistics.median(self._early), max(self._early)

    def median(self, *, require_min: bool = True) -> float | None:
        """Return the median step time within 2 %; with ``require_min``, None before ten minutes and twenty steps."""
        if not self._steps or (require_min and (self._seconds < self.MIN_S or self._steps < self.MIN_STEPS)):
            return None
        cumulative_steps = 0.0
        for index in sorted(self._bins):
            cumulative_steps += self._bins[index]
            if cumulative_steps >= self._steps / 2:
                break
        return math.exp(index * _BIN_LOG_WIDTH)
