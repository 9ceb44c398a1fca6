"""Compare the plan's predictions with the run's measurements: ``prediction`` in ``status --json``."""

from __future__ import annotations

import msgspec

from clustertrain import schema
from clustertrain.plan.cost.memory import MemoryEstimate
from clustertrain.plan.planner import TimeEstimate
from clustertrain.run import json_files
from clustertrain.run.run_dir import RunDir
from clustertrain.run.usage import measured_speed
from clustertrain.telemetry.analysis import peak_memory


class Pair(msgspec.Struct, frozen=True):
    """A predicted and a measured value, in the unit of the key."""

    predicted: float | None = None
    """What the plan predicts; null on CPUs, for scripts, and where the plan knows too little."""
    measured: float | None = None
    """What was measured over the attempts of the comparison; null if nothing was measured, and for memory on CPUs."""

    @property
    def ratio(self) -> float | None:
        """Return the measured over the predicted value."""
        return self.measured / self.predicted if self.predicted and self.measured is not None else None


class PlanAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions and measurements of one run."""

    step_s: Pair = Pair()
    """Time per optimizer step, seconds."""
    tokens_per_s_per_gpu: Pair = Pair()
    """Tokens per second and GPU."""
    peak_gib: Pair = Pair()
    """Memory of the fullest GPU, measured by NVML, GiB; both values are null on CPUs."""
    allocated_gib: Pair = Pair()
    """Memory allocated by torch on the largest rank, without CUDA context, NCCL and the allocator's reserve,
    GiB; both values are null on CPUs."""
    steps: int = 0
    """Measured steps."""
    attempts: tuple[int, ...] = ()
    """The attempts that were measured."""
    other_attempts: tuple[int, ...] = ()
    """The attempts with another number of ranks than planned, which are not measured."""


class _PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """The measurable part of ``plan.json``."""

    world_size: int
    device: str
    memory: MemoryEstimate
    time: TimeEstimate


def compare_run(run: RunDir) -> PlanAccuracy:
    """Compare all attempts with the planned number of ranks, including a running one.

    The result is empty if the plan is missing or unreadable.
    """
    try:
        planned = schema.convert(json_files.load_document(run.plan).value, _PlanFile)
    except msgspec.ValidationError:  # missing, damaged, or from another version
        return PlanAccuracy()
    matching, others = measured_speed.split_by_world_size(run, planned.world_size)
    speed = measured_speed.measure_speed(run, matching)
    tokens_per_s_per_gpu = speed.tokens_per_s / planned.world_size if speed.tokens_per_s is not None else None
    memory = planned.memory
    allocated_gib = memory.peak_gib - (memory.overhead_gib or 0.0) if memory.peak_gib is not None else None
    is_cuda = planned.device == "cuda"  # host memory on CPUs is not comparable
    return PlanAccuracy(
        step_s=Pair(planned.time.step_s, speed.step_s),
        tokens_per_s_per_gpu=Pair(planned.time.tokens_per_s_per_gpu, tokens_per_s_per_gpu),
        peak_gib=Pair(memory.peak_gib, peak_memory.read_peak_memory_gib(matching)) if is_cuda else Pair(),
        allocated_gib=Pair(allocated_gib, measured_speed.find_peak_allocated_gib(run, matching)) if is_cuda else Pair(),
        steps=speed.steps,
        attempts=tuple(a.n for a in matching),
        other_attempts=tuple(a.n for a in others),
    )
