"""What the plan predicted beside what the run measured. Its shape is ``prediction`` of ``status --json``."""

from __future__ import annotations

import msgspec

from clustertrain import schema
from clustertrain.plan.cost.memory import MemoryEstimate
from clustertrain.plan.planner import TimeEstimate
from clustertrain.run import json_files, measured_speed
from clustertrain.run.run_dir import RunDir
from clustertrain.telemetry.analysis import peak_memory


class Pair(msgspec.Struct, frozen=True):
    """None: nothing was predicted (on CPUs, of a script), or nothing is measured yet."""

    predicted: float | None = None
    measured: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted and self.measured is not None else None


class PlanAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """``peak_gib`` is the fullest GPU as NVML sees it, ``allocated_gib`` what torch's allocator gives out on the rank
    that needs most: the same without the CUDA context, NCCL and the allocator's reserve.

    ``steps`` were measured in ``attempts``; ``other_attempts`` had another number of ranks than the plan.
    """

    step_s: Pair = Pair()
    tokens_per_s_per_gpu: Pair = Pair()
    peak_gib: Pair = Pair()
    allocated_gib: Pair = Pair()
    steps: int = 0
    attempts: tuple[int, ...] = ()
    other_attempts: tuple[int, ...] = ()


class _PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """Of ``plan.json`` what can be measured."""

    world_size: int
    device: str
    memory: MemoryEstimate
    time: TimeEstimate


def compare_run(run: RunDir) -> PlanAccuracy:
    """Of all attempts on as many ranks as were planned; what is still going counts as far as it is. Without a plan that
    reads there is nothing to compare with."""
    try:
        planned = schema.convert(json_files.load_document(run.plan).value, _PlanFile)
    except msgspec.ValidationError:  # missing, damaged, or of another version
        return PlanAccuracy()
    matching, others = measured_speed.split_by_world_size(run, planned.world_size)
    speed = measured_speed.measure_speed(run, matching)
    tokens_per_s_per_gpu = speed.tokens_per_s / planned.world_size if speed.tokens_per_s is not None else None
    memory = planned.memory
    allocated_gib = memory.peak_gib - (memory.overhead_gib or 0.0) if memory.peak_gib is not None else None
    is_cuda = planned.device == "cuda"  # the memory of a process on the CPU is another thing
    return PlanAccuracy(
        step_s=Pair(planned.time.step_s, speed.step_s),
        tokens_per_s_per_gpu=Pair(planned.time.tokens_per_s_per_gpu, tokens_per_s_per_gpu),
        peak_gib=Pair(memory.peak_gib, peak_memory.read_peak_memory_gib(matching)) if is_cuda else Pair(),
        allocated_gib=Pair(allocated_gib, measured_speed.find_peak_allocated_gib(run, matching)) if is_cuda else Pair(),
        steps=speed.steps,
        attempts=tuple(a.n for a in matching),
        other_attempts=tuple(a.n for a in others),
    )
