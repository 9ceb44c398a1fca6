"""The metrics row of each step: the script's scalars, the session's measurements and the training step's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from clustertrain.config.train import TrainSpec
from clustertrain.run.run_dir import RunDir
from clustertrain.train.core.async_copy import AsyncCopy
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.memory import allocated_gib, peak_allocated_gib
from clustertrain.train.core.step_types import StepResult, sole_bad_micro_batch
from clustertrain.train.data.loader import Loader
from clustertrain.train.session.heartbeat import ProgressReporter
from clustertrain.train.session.metrics_writer import MetricsWriter, PlainValue, Scalar, check_scalar
from clustertrain.train.stability.layer_stats import LayerStats
from clustertrain.train.stability.monitor import StabilityMonitor
from clustertrain.train.stability.noise_scale import NoiseScale
from clustertrain.train.stability.warnings import BAD_SAMPLES_KEY, WarningReporter

_GIB = 1 << 30
_NONFINITE_COLUMNS = ("_bad", "_bad_numbers", "_bad_squares")  # removed before the row is written


class MetricsProcessor:
    """Builder of each step's row, which it passes to ``writer``.

    ``writer`` has a file on rank 0 of a run; outside a run, rank 0 prints its rows. ``monitor`` is set once the session
    has an optimizer.
    """

    def __init__(
        self, context: RankContext, progress: ProgressReporter, loaders: Sequence[Loader], warnings: WarningReporter
    ) -> None:
        """``loaders`` is a list that the session appends to."""
        self._device = context.device
        self._loaders = loaders
        self._progress = progress
        self._log_every = context.spec.recipe.train.log_every if context.spec else TrainSpec().log_every
        is_recording = context.rank == 0 and context.run is not None and context.attempt is not None
        self._run: RunDir | None = context.run if is_recording else None
        self._attempt = context.attempt.n if context.attempt is not None else 0
        metrics_path = self._metrics_path(-1)
        progress.load_totals(metrics_path)
        self._warnings = warnings
        self.monitor: StabilityMonitor | None = None
        echo_every = self._log_every if context.rank == 0 else 0
        self.writer = MetricsWriter(metrics_path, echo_every, self._finalize_row, warnings.observe)
        self._logged: dict[str, PlainValue | torch.Tensor] = {}
        self._step_values: dict[str, PlainValue | torch.Tensor] = {}
        self._pending_copies: list[AsyncCopy] = []
        self._excluded_s = 0.0  # time in the current step that is not training
        self._samples_before: list[int] = []

    def _metrics_path(self, index: int) -> Path | None:
        return self._run.metrics_files(self._attempt)[index] if self._run is not None else None

    @property
    def skipped_steps(self) -> int:
        """Bad steps of the run that were skipped, as far as they have been checked."""
        return self.monitor.divergence_policy.skipped if self.monitor is not None else 0

    def layer_stats_for(self, step: int) -> LayerStats | None:
        return self.monitor.layer_stats_for(step) if self.monitor is not None else None

    def noise_scale_for(self, step: int) -> NoiseScale | None:
        return self.monitor.noise_scale_for(step) if self.monitor is not None else None

    def log(self, scalars: Mapping[str, Scalar]) -> None:
        """Add scalars to the current row; see ``Session.log``, also for errors."""
        self._logged.update({name: check_scalar(name, value) for name, value in scalars.items()})

    def has_logged(self, name: str) -> bool:
        """Return whether the script logged ``name`` in the current step or, between two steps, in the last one."""
        return name in self._logged

    def exclude_time(self, seconds: float) -> None:
        self._excluded_s += seconds

    def record_step(self, result: StepResult, lr: float) -> None:
        """Add the results of a training step and its learning rate to the current row.

        Values that the script logs take precedence.
        """
        names = ("loss", "grad_norm", "clipped", "clip_fraction", "skipped", "spike", *_NONFINITE_COLUMNS)
        values = (
            result.loss,
            result.grad_norm,
            result.clipped.int(),
            result.clip_fraction,
            result.skipped.int(),
            result.spike.int(),
            *result.bad,
        )
        self._pending_copies = [AsyncCopy(names, values)] if self.writer.is_active else []
        if result.noise_scale is not None and self.writer.is_active:
            self._pending_copies.append(AsyncCopy(["noise_scale"], [result.noise_scale]))
        if result.layers is not None and self.writer.is_active:
            self._pending_copies.append(result.layers)
        if self.monitor is not None:
            self.monitor.record_step(result)
        self._step_values = {"lr": lr, **({"overflow": 1} if result.overflow else {})}

    def _finalize_row(self, row: dict[str, Any]) -> None:
        """Add the generalization gap of an evaluation and the samples of a bad step to its row before it is written.

        A step that overflowed fp16 is not bad: the loss scale handles it.
        """
        self._warnings.finalize(row)
        moments = [row.pop(name) for name in _NONFINITE_COLUMNS if name in row]
        if not moments or self.monitor is None or row.get("overflow"):
            return
        if row["skipped"] or row["spike"]:
            samples_text = self.monitor.describe_samples(row["step"], sole_bad_micro_batch(*moments))
            row.update({BAD_SAMPLES_KEY: samples_text} if samples_text else {})

    def begin_loop(self, total_steps: int) -> None:
        """Print the time left of a loop up to step ``total_steps``."""
        self.writer.line.begin(total_steps)

    def begin_step(self, step: int) -> None:
        """Start a row; ``step`` is the number of steps done."""
        self._logged, self._step_values, self._pending_copies, self._excluded_s = {}, {}, [], 0.0
        for loader in self._loaders:
            loader.wait_s = 0.0
        self._samples_before = [loader.samples_consumed for loader in self._loaders]
        if self.monitor is not None:
            self.monitor.begin_step()
        self._progress.begin_step(step)

    def end_step(self, step: int, tokens: int) -> None:
        """Queue the row of step ``step``, counted from 1, which trained on ``tokens`` tokens; 0 if unknown."""
        if self.monitor is not None:
            self.monitor.end_step(step)
        wait_s = sum(loader.wait_s for loader in self._loaders) if self._loaders else None
        # A loader created during this step started at zero.
        samples_before = [*self._samples_before, *([0] * (len(self._loaders) - len(self._samples_before)))]
        samples = sum(
            loader.samples_consumed - before for loader, before in zip(self._loaders, samples_before, strict=True)
        )
        row = self._progress.end_step(step, self._excluded_s, tokens, wait_s, samples)
        row.update(self._memory_stats(step))
        if self.skipped_steps:
            row["sum_skipped"] = self.skipped_steps
        self.writer.enqueue(row, {**self._step_values, **self._logged}, self._pending_copies)

    def _memory_stats(self, step: int) -> dict[str, float]:
        is_logged_step = bool(self._log_every) and step % self._log_every == 0
        if self._device.type != "cuda":
            return {"rss_gib": psutil.Process().memory_info().rss / _GIB} if is_logged_step else {}
        stats = {"allocated_gib": allocated_gib(self._device)}
        if is_logged_step:
            stats["peak_allocated_gib"] = peak_allocated_gib(self._device) or 0.0
        return stats

    def on_rollback(self) -> None:
        """Drop the current row and start a new file: step numbers only increase within a metrics file."""
        self._logged, self._step_values, self._pending_copies = {}, {}, []
        if self._run is not None:
            file_index = len(self._run.metrics_files(self._attempt))
            self.writer.switch_file(self._run.metrics_path(self._attempt, file_index))
