"""Training progress and its energy: steps, tokens and FLOPs, from the metrics of rank 0 and the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from clustertrain import schema
from clustertrain.config import hardware
from clustertrain.run import events, json_files, metrics, metrics_file
from clustertrain.run.attempts import Attempt
from clustertrain.run.run_dir import RunDir
from clustertrain.run.usage.measured_speed import WARM_UP_STEPS
from clustertrain.telemetry.report_schema import GpuSummary, Stats, TrainingSummary

KEYS = ("step", "t", "step_s", "tokens_per_s", "data_wait_s")
Column = npt.NDArray[np.float64]


class Energy(NamedTuple):
    """Energy used by the GPUs."""

    joules: float | None = None
    is_complete: bool = True  # whether it covers all GPUs over the whole time


class _Batch(msgspec.Struct, frozen=True):
    global_batch: int = 0
    tokens_per_step: int = 0


class _Time(msgspec.Struct, frozen=True):
    flops_per_step: float | None = None


class _TrainingPlan(msgspec.Struct, frozen=True):
    """Required fields of ``plan.json``."""

    device: str = ""
    world_size: int = 0
    batch: _Batch = _Batch()
    time: _Time = _Time()


@dataclass(frozen=True)
class _StepColumns:
    """The counted steps of one attempt, in order; one column for each of :data:`KEYS`."""

    columns: dict[str, Column]
    ranks: int
    warm: npt.NDArray[np.bool_]  # steps after the warm-up, which includes compilation

    def column(self, key: str) -> Column:
        return self.columns[key]

    def select(self, mask: npt.NDArray[np.bool_]) -> _StepColumns:
        return _StepColumns({k: c[mask] for k, c in self.columns.items()}, self.ranks, self.warm[mask])


def summarize_training(
    run: RunDir, attempts: Sequence[Attempt], energy: Energy, gpus: Sequence[GpuSummary], since: float | None = None
) -> TrainingSummary | None:
    """Summarize the training of a run; None if no step is recorded.

    Speeds exclude the warm-up steps of each attempt if there are others. They divide tokens by the time within steps,
    so checkpoints and evaluations do not lower them.

    Args:
        energy: energy over all ``attempts``; the energy per token is set only if it is complete.
        gpus: GPUs of the run, whose names give their peak speed; empty for a run on CPUs.
        since: count only steps from this time on (UTC s).
    """
    plan = _load_plan(run)
    attempt_steps = _steps_by_attempt(run, attempts, plan.world_size, since)
    if not attempt_steps:
        return None
    steps = sum(len(p.column("step")) for p in attempt_steps)
    steady = [p.select(p.warm) for p in attempt_steps]
    if not any(len(p.column("step")) for p in steady):
        steady = attempt_steps
    step_s = np.concatenate([p.column("step_s") for p in steady])
    tokens = _total_tokens(attempt_steps)
    speed, speed_per_gpu = _token_rates(steady)
    wait_s = np.concatenate([p.column("data_wait_s") for p in attempt_steps])
    has_wait = np.isfinite(wait_s)
    step_total_s = float(np.nansum(np.concatenate([p.column("step_s") for p in attempt_steps])[has_wait]))
    batch = plan.batch.global_batch
    steady_s = float(np.nansum(step_s))
    return TrainingSummary(
        steps=steps,
        tokens=tokens,
        step_s=_stats(step_s),
        tokens_per_s=speed,
        tokens_per_s_per_gpu=speed_per_gpu if gpus else None,
        mfu=_mfu(plan, speed_per_gpu, gpus),
        energy_j=energy.joules,
        joules_per_token=energy.joules / tokens
        if energy.joules is not None and energy.is_complete and tokens
        else None,
        data_wait_share=float(wait_s[has_wait].sum()) / step_total_s if step_total_s > 0 else None,
        loss=_latest_loss(run, attempts),
        samples=steps * batch if batch else None,
        samples_per_s=len(step_s) * batch / steady_s if batch and steady_s > 0 else None,
    )


def _load_plan(run: RunDir) -> _TrainingPlan:
    try:
        return schema.convert(json_files.poll_document(run.plan), _TrainingPlan)
    except msgspec.ValidationError:  # of another version
        return _TrainingPlan()


def _steps_by_attempt(
    run: RunDir, attempts: Sequence[Attempt], planned_ranks: int, since: float | None
) -> list[_StepColumns]:
    """Return the counted steps by attempt; a repeated step counts for the last attempt that did it."""
    attempt_steps: list[_StepColumns] = []
    for attempt, path in ((a, path) for a in attempts for path in run.metrics_files(a.n)):
        columns = {key: np.asarray(c) for key, c in metrics_file.read_columns(path, KEYS).items()}
        step = columns["step"]
        has_step = np.isfinite(step)
        if not has_step.any():
            continue
        started = events.find_last(events.for_attempt(run.attempt(attempt.n)), "session_started") or {}
        current = _StepColumns(
            columns, int(started.get("world_size") or planned_ranks or 1), np.arange(len(step)) >= WARM_UP_STEPS
        )
        first = step[has_step].min()
        attempt_steps = [p.select(p.column("step") < first) for p in attempt_steps]
        attempt_steps.append(current.select(has_step if since is None else has_step & (columns["t"] >= since)))
    return [p for p in attempt_steps if len(p.column("step"))]


def _total_tokens(attempt_steps: Sequence[_StepColumns]) -> float | None:
    token_counts = np.concatenate([p.column("tokens_per_s") * p.column("step_s") for p in attempt_steps])
    return float(np.nansum(token_counts)) if np.isfinite(token_counts).any() else None


def _token_rates(attempt_steps: Sequence[_StepColumns]) -> tuple[float | None, float | None]:
    """Return tokens per second of all ranks, and per rank; attempts may differ in their number of ranks."""
    tokens = seconds = rank_seconds = 0.0
    for p in attempt_steps:
        has_rate = np.isfinite(p.column("tokens_per_s"))
        step_s = p.column("step_s")[has_rate]
        tokens += float(np.nansum(p.column("tokens_per_s")[has_rate] * step_s))
        seconds += float(np.nansum(step_s))
        rank_seconds += float(np.nansum(step_s)) * p.ranks
    return (tokens / seconds, tokens / rank_seconds) if tokens > 0 and seconds > 0 else (None, None)


def _mfu(plan: _TrainingPlan, tokens_per_s_per_gpu: float | None, gpus: Sequence[GpuSummary]) -> float | None:
    """Return the model FLOPs utilization relative to the data sheet's dense 16-bit rate, as in the plan.

    None if the model's FLOPs are unknown or the catalog lacks the GPU.
    """
    flops, tokens = plan.time.flops_per_step, plan.batch.tokens_per_step
    gpu_types = [hardware.find_gpu_type(gpu.name or "") if gpu.parent is None else None for gpu in gpus]
    peaks = [gpu_type.tflops for gpu_type in gpu_types if gpu_type is not None and gpu_type.tflops > 0]
    if not flops or not tokens or tokens_per_s_per_gpu is None or not peaks or len(peaks) < len(gpu_types):
        return None
    return tokens_per_s_per_gpu * flops / tokens / (sum(peaks) / len(peaks) * 1e12)


def _stats(values: Column) -> Stats | None:
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    p5, p50, p95 = (float(v) for v in np.percentile(values, (5, 50, 95)))
    return Stats(mean=float(values.mean()), p5=p5, p50=p50, p95=p95, max=float(values.max()))


def _latest_loss(run: RunDir, attempts: Sequence[Attempt]) -> float | None:
    """Return the loss of the newest step; None if missing, NaN or infinite."""
    for attempt in reversed(attempts):
        row = metrics.find_newest_row(run, attempt.n)
        if row is not None:
            loss = row.get("loss")
            return float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None
    return None
