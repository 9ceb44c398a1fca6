"""What the energy bought: steps, tokens and floating point operations, from the rows of rank 0 and the plan."""

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
from clustertrain.run.measured_speed import WARM_UP_STEPS
from clustertrain.run.run_dir import RunDir
from clustertrain.telemetry.report_schema import GpuSummary, Stats, TrainingSummary

KEYS = ("step", "t", "step_s", "tokens_per_s", "data_wait_s")
Column = npt.NDArray[np.float64]


class Energy(NamedTuple):
    """``joules`` that the GPUs drew, None where none told; ``of_all``: all of them did, over the whole time."""

    joules: float | None = None
    of_all: bool = True


class _Batch(msgspec.Struct, frozen=True):
    global_batch: int = 0
    tokens_per_step: int = 0


class _Time(msgspec.Struct, frozen=True):
    flops_per_step: float | None = None


class _Planned(msgspec.Struct, frozen=True):
    """Of ``plan.json`` what is needed here."""

    device: str = ""
    world_size: int = 0
    batch: _Batch = _Batch()
    time: _Time = _Time()


@dataclass(frozen=True)
class _Steps:
    """One attempt's steps that count, in their order; a column each of :data:`KEYS`."""

    columns: dict[str, Column]
    ranks: int
    warm: npt.NDArray[np.bool_]  # done when compilation and the like were over

    def of(self, key: str) -> Column:
        return self.columns[key]

    def where(self, mask: npt.NDArray[np.bool_]) -> _Steps:
        return _Steps({k: c[mask] for k, c in self.columns.items()}, self.ranks, self.warm[mask])


def training_of(
    run: RunDir, attempts: Sequence[Attempt], energy: Energy, gpus: Sequence[GpuSummary], since: float | None = None
) -> TrainingSummary | None:
    """None where no step is on record.

    Speeds are over the steps that count, without the first ones of each attempt where there are more: tokens over the
    seconds within steps, so neither checkpoints nor evaluation slow them down.

    Args:
        energy: what was drawn over all ``attempts``; a token costs energy only if it is that of all GPUs.
        gpus: those that the run had; their names tell what they could do. Empty where it ran on CPUs.
        since: only steps done from there on (UTC s).
    """
    planned = _planned(run)
    parts = _counted(run, attempts, planned.world_size, since)
    if not parts:
        return None
    steps = sum(len(p.of("step")) for p in parts)
    steady = [p.where(p.warm) for p in parts]
    if not any(len(p.of("step")) for p in steady):
        steady = parts
    step_s = np.concatenate([p.of("step_s") for p in steady])
    tokens = _tokens(parts)
    speed, a_gpu = _speed(steady)
    wait_s = np.concatenate([p.of("data_wait_s") for p in parts])
    waited = np.isfinite(wait_s)
    stepped_s = float(np.nansum(np.concatenate([p.of("step_s") for p in parts])[waited]))
    batch = planned.batch.global_batch
    steady_s = float(np.nansum(step_s))
    return TrainingSummary(
        steps=steps,
        tokens=tokens,
        step_s=_stats(step_s),
        tokens_per_s=speed,
        tokens_per_s_per_gpu=a_gpu if gpus else None,
        mfu=_mfu(planned, a_gpu, gpus),
        energy_j=energy.joules,
        joules_per_token=energy.joules / tokens if energy.joules is not None and energy.of_all and tokens else None,
        data_wait_share=float(wait_s[waited].sum()) / stepped_s if stepped_s > 0 else None,
        loss=_loss(run, attempts),
        samples=steps * batch if batch else None,
        samples_per_s=len(step_s) * batch / steady_s if batch and steady_s > 0 else None,
    )


def _planned(run: RunDir) -> _Planned:
    try:
        return schema.convert(json_files.peek(run.plan), _Planned)
    except msgspec.ValidationError:  # of another version
        return _Planned()


def _counted(run: RunDir, attempts: Sequence[Attempt], planned: int, since: float | None) -> list[_Steps]:
    """By attempt. A step that several attempts did counts as the last of them did it."""
    found: list[_Steps] = []
    for attempt, path in ((a, path) for a in attempts for path in run.metrics_files(a.n)):
        columns = {key: np.asarray(c) for key, c in metrics_file.columns(path, KEYS).items()}
        step = columns["step"]
        known = np.isfinite(step)
        if not known.any():
            continue
        started = events.last(events.of_attempt(run.attempt(attempt.n)), "session_started") or {}
        mine = _Steps(columns, int(started.get("world_size") or planned or 1), np.arange(len(step)) >= WARM_UP_STEPS)
        first = step[known].min()
        found = [p.where(p.of("step") < first) for p in found]
        found.append(mine.where(known if since is None else known & (columns["t"] >= since)))
    return [p for p in found if len(p.of("step"))]


def _tokens(parts: Sequence[_Steps]) -> float | None:
    made = np.concatenate([p.of("tokens_per_s") * p.of("step_s") for p in parts])
    return float(np.nansum(made)) if np.isfinite(made).any() else None


def _speed(parts: Sequence[_Steps]) -> tuple[float | None, float | None]:
    """Tokens a second of all ranks, and of one; attempts may have had unlike numbers of them."""
    tokens = seconds = rank_seconds = 0.0
    for p in parts:
        told = np.isfinite(p.of("tokens_per_s"))
        step_s = p.of("step_s")[told]
        tokens += float(np.nansum(p.of("tokens_per_s")[told] * step_s))
        seconds += float(np.nansum(step_s))
        rank_seconds += float(np.nansum(step_s)) * p.ranks
    return (tokens / seconds, tokens / rank_seconds) if tokens > 0 and seconds > 0 else (None, None)


def _mfu(planned: _Planned, tokens_per_s_per_gpu: float | None, gpus: Sequence[GpuSummary]) -> float | None:
    """Model FLOPs utilisation, against the dense 16-bit rate of the data sheet, as the plan's; None of a model whose
    FLOPs nobody has counted, and of a GPU that the catalogue does not have."""
    flops, tokens = planned.time.flops_per_step, planned.batch.tokens_per_step
    types = [hardware.find(gpu.name or "") if gpu.parent is None else None for gpu in gpus]
    peaks = [kind.tflops for kind in types if kind is not None and kind.tflops > 0]
    if not flops or not tokens or tokens_per_s_per_gpu is None or not peaks or len(peaks) < len(types):
        return None
    return tokens_per_s_per_gpu * flops / tokens / (sum(peaks) / len(peaks) * 1e12)


def _stats(values: Column) -> Stats | None:
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    p5, p50, p95 = (float(v) for v in np.percentile(values, (5, 50, 95)))
    return Stats(mean=float(values.mean()), p5=p5, p50=p50, p95=p95, max=float(values.max()))


def _loss(run: RunDir, attempts: Sequence[Attempt]) -> float | None:
    """Of the newest step; None where it has none, or one that is no number."""
    for attempt in reversed(attempts):
        row = metrics.newest_row(run, attempt.n)
        if row is not None:
            loss = row.get("loss")
            return float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None
    return None
