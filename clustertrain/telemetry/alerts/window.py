"""The last minutes of a node in sums of ten seconds, for the rules of :mod:`.alerts`. Plain floats: a tick adds some
dozens of them, for which numpy would cost more than it saves."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from clustertrain.run import heartbeat
from clustertrain.telemetry.fields import column
from clustertrain.telemetry.store.writer import GpuFacts

BUCKET_S = 10.0
KEPT = 60  # buckets: ten minutes
WARM_S = 180.0  # of training
RECENT = 30  # of them the five minutes in which figures are compared

_GROWTH = math.log(1.02)


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(slots=True)
class GpuBucket:
    """Seconds, and sums of figure x seconds. ``busy_known``: seconds in which the utilization was known; ``trained``:
    in which the clock was, while the GPU's rank trained; ``used_known``: the same of the utilization, without the first
    minutes, in which kernels are compiled."""

    busy_known: float = 0.0
    busy: float = 0.0
    memory: float = 0.0  # the highest
    held_known: float = 0.0
    thermal: float = 0.0
    hardware: float = 0.0
    trained: float = 0.0
    clock: float = 0.0
    used_known: float = 0.0
    used: float = 0.0
    power_known: float = 0.0
    energy: float = 0.0


class GpuWindow:
    """One GPU. Its columns are named once: building the names would be most of a tick."""

    def __init__(self, number: int, facts: GpuFacts) -> None:
        self.facts = facts
        self.rank = facts.ranks[0] if facts.ranks else None
        self.idle_s = 0.0
        self.power_trained = (0.0, 0.0)  # seconds and joules over the whole attempt, while training
        self.bucket = GpuBucket()
        self.past: deque[GpuBucket] = deque(maxlen=KEPT)
        self.device = device = f"gpu{number}"
        self._util, self._memory = column(device, "utilization"), column(device, "memory_used_bytes")
        self._thermal, self._hardware = column(device, "throttle_thermal"), column(device, "throttle_hardware")
        self._clock, self._power = column(device, "sm_clock_mhz"), column(device, "power_w")
        self.uncorrected = column(device, "ecc_uncorrected")
        self.remap_failed, self.remap_pending = column(device, "remap_failed"), column(device, "remap_pending")

    @property
    def where(self) -> str:
        return f"GPU {self.facts.uuid if self.facts.index is None else self.facts.index}"

    def add(self, values: Mapping[str, float], dt: float, training: bool, warm: bool) -> None:
        """``warm``: the first minutes of its training are over."""
        b = self.bucket
        busy = finite(values.get(self._util))
        if busy is not None:
            b.busy_known += dt
            b.busy += busy * dt
            if training and warm:
                b.used_known += dt
                b.used += busy * dt
        memory = finite(values.get(self._memory))
        if memory is not None and memory > b.memory:
            b.memory = memory
        thermal, hardware = finite(values.get(self._thermal)), finite(values.get(self._hardware))
        if thermal is not None or hardware is not None:
            b.held_known += dt
            b.thermal += dt if thermal else 0.0
            b.hardware += dt if hardware else 0.0
        power = finite(values.get(self._power))
        if power is not None:
            b.power_known += dt
            b.energy += power * dt
        if training:
            clock = finite(values.get(self._clock))
            if clock is not None:
                b.trained += dt
                b.clock += clock * dt

    def close(self) -> GpuBucket:
        """End the bucket and begin another."""
        done, self.bucket = self.bucket, GpuBucket()
        self.past.append(done)
        if done.trained >= BUCKET_S / 2 and done.power_known:
            seconds, joules = self.power_trained
            self.power_trained = seconds + done.power_known, joules + done.energy
        return done

    def clock_mhz(self, least_s: float) -> float | None:
        """Mean over the recent buckets while training; None where fewer seconds than ``least_s`` are known."""
        trained = clock = 0.0
        for b in _recent(self.past):
            trained += b.trained
            clock += b.clock
        return clock / trained if trained >= least_s else None

    def utilization(self, least_s: float) -> float | None:
        """Mean over the recent buckets while training, as :meth:`clock_mhz`."""
        known = used = 0.0
        for b in _recent(self.past):
            known += b.used_known
            used += b.used
        return used / known if known >= least_s else None

    def held_s(self) -> tuple[float, float]:
        """Seconds held down by heat, and by the hardware, in the last ten minutes."""
        thermal = hardware = 0.0
        for b in self.past:
            thermal += b.thermal
            hardware += b.hardware
        return thermal, hardware

    def spins(self) -> bool:
        """Busy without drawing what it draws in training: it waits in a collective, which is a kernel that polls."""
        seconds, joules = self.power_trained
        if not self.past or not seconds:
            return False
        b = self.past[-1]
        if not b.busy_known or not b.power_known or b.busy / b.busy_known < 0.95:
            return False
        return b.energy / b.power_known < 0.6 * joules / seconds


def _recent(past: deque[GpuBucket]) -> list[GpuBucket]:
    return list(past)[-RECENT:]


@dataclass(frozen=True, slots=True)
class RankMark:
    step: float
    data_wait_s: float | None
    forward_s: float | None
    train_s: float


class RankWindow:
    """One rank. ``train_s`` counts the seconds in which it trained."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.phase: int | None = None
        self.step: float | None = None
        self.train_s = 0.0
        self.begun = False  # it has been seen training
        self.marks: deque[RankMark] = deque(maxlen=RECENT + 1)
        device = f"rank{rank}"
        self._step, self._phase = column(device, "step"), column(device, "phase")
        self._wait, self._forward = column(device, "data_wait_s"), column(device, "forward_s")

    @property
    def training(self) -> bool:
        return self.phase == heartbeat.TRAIN

    @property
    def warm(self) -> bool:
        """The first minutes, in which kernels are compiled and caches fill, are over."""
        return self.train_s >= WARM_S

    def add(self, values: Mapping[str, float], dt: float) -> bool:
        """Whether the step advanced."""
        phase = finite(values.get(self._phase))
        self.phase = None if phase is None else int(phase)
        if self.training:
            self.begun = True
            self.train_s += dt
        step = finite(values.get(self._step))
        if step is None or step == self.step:
            return False
        self.step = step
        return True

    def close(self, values: Mapping[str, float]) -> None:
        if self.step is None or not self.training:
            return
        if self.marks and self.step < self.marks[-1].step:  # another process began
            self.marks.clear()
        wait, forward = finite(values.get(self._wait)), finite(values.get(self._forward))
        self.marks.append(RankMark(self.step, wait, forward, self.train_s))

    def per_step(self, figure: str, least_s: float) -> float | None:
        """``data_wait_s``, ``forward_s`` or ``train_s`` of a step, over the recent marks."""
        if len(self.marks) < 2:
            return None
        first, last = self.marks[0], self.marks[-1]
        a, b, steps = getattr(first, figure), getattr(last, figure), last.step - first.step
        if a is None or b is None or b < a or steps <= 0 or last.train_s - first.train_s < least_s:
            return None
        return float((b - a) / steps)


class StepTimes:
    """The time of a step over the last minutes of training, and its median over all of the attempt.

    Time counts while the rank trains, so that neither a checkpoint nor an evaluation makes a step slow. The first
    minutes count in neither; :meth:`early` is what they show.
    """

    RECENT_S, RECENT_STEPS, ENOUGH_S, ENOUGH_STEPS = 300.0, 10, 600.0, 20
    EARLY = 3  # advances: two of them may be of the first step

    def __init__(self) -> None:
        self._early: list[float] = []  # seconds a step at each advance of the first minutes
        self._advanced: tuple[float, float] | None = None  # training seconds and step when it last advanced
        self._marks: deque[tuple[float, float]] = deque()
        self._bins: dict[int, float] = {}
        self._seconds = self._steps = 0.0

    def advanced(self, train_s: float, step: float) -> None:
        """At each advance; cheap."""
        if train_s < WARM_S or len(self._early) < self.EARLY:
            before_s, before = self._advanced or (0.0, step - 1)
            self._early.append((train_s - before_s) / max(1.0, step - before))
        self._advanced = train_s, step

    def close(self) -> None:
        """Once in ten seconds."""
        now = self._advanced
        if now is None or now[0] < WARM_S or (self._marks and now[1] == self._marks[-1][1]):
            return
        if self._marks and now[1] < self._marks[-1][1]:
            self._marks.clear()
        if self._marks:
            seconds, steps = now[0] - self._marks[-1][0], now[1] - self._marks[-1][1]
            if seconds > 0:
                self._count(seconds / steps, seconds, steps)
        self._marks.append(now)
        while len(self._marks) > 2 and self._long_enough(self._marks[1]):
            self._marks.popleft()

    def _count(self, step_s: float, seconds: float, steps: float) -> None:
        bin_ = round(math.log(step_s) / _GROWTH)
        self._bins[bin_] = self._bins.get(bin_, 0.0) + steps
        self._seconds += seconds
        self._steps += steps

    def _long_enough(self, mark: tuple[float, float]) -> bool:
        last = self._marks[-1]
        return last[0] - mark[0] >= self.RECENT_S and last[1] - mark[1] >= self.RECENT_STEPS

    def recent(self) -> float | None:
        """Seconds a step over five minutes of training and ten steps at least."""
        if not self._marks or not self._long_enough(self._marks[0]):
            return None
        first, last = self._marks[0], self._marks[-1]
        return (last[0] - first[0]) / (last[1] - first[1])

    def early(self) -> tuple[float, float] | None:
        """The median and the longest time of a step in the first minutes; None until some have been seen."""
        if len(self._early) < self.EARLY:
            return None
        return statistics.median(self._early), max(self._early)

    def median(self, *, enough: bool = True) -> float | None:
        """Within 2 %. With ``enough`` None until ten minutes and twenty steps are known."""
        if not self._steps or (enough and (self._seconds < self.ENOUGH_S or self._steps < self.ENOUGH_STEPS)):
            return None
        passed = 0.0
        for bin_ in sorted(self._bins):
            passed += self._bins[bin_]
            if passed >= self._steps / 2:
                break
        return math.exp(bin_ * _GROWTH)
