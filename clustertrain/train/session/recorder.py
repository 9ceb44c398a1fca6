"""The row of each step: what the script logs, what the session measures, what the step's own figures are."""

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
from clustertrain.train.optim.lr_schedule import LR_SCALE
from clustertrain.train.session.heartbeat import ProgressReporter
from clustertrain.train.session.metrics_writer import MetricsWriter, PlainValue, Scalar, check_scalar
from clustertrain.train.stability.layer_stats import LayerStats
from clustertrain.train.stability.monitor import StabilityMonitor
from clustertrain.train.stability.warnings import BAD_SAMPLES_KEY, WarningReporter

_GIB = 1 << 30
_NONFINITE_COLUMNS = ("_bad", "_bad_numbers", "_bad_squares")  # arrive with a row, and are not in it


class MetricsProcessor:
    """``writer`` has a file on rank 0 of a run; outside a run rank 0 prints its rows. ``monitor``: what watches over
    the steps, where the session does them."""

    def __init__(
        self, context: RankContext, progress: ProgressReporter, loaders: Sequence[Loader], warnings: WarningReporter
    ) -> None:
        """``loaders``: a list that may grow."""
        self._device = context.device
        self._loaders = loaders
        self._progress = progress
        self._log_every = context.spec.recipe.train.log_every if context.spec else TrainSpec().log_every
        is_recording = context.rank == 0 and context.run is not None and context.attempt is not None
        self._run: RunDir | None = context.run if is_recording else None
        self._attempt = context.attempt.n if context.attempt is not None else 0
        metrics_path = self._metrics_path(-1)
        progress.load_totals(metrics_path)
        self.monitor: StabilityMonitor | None = None
        echo_every = self._log_every if context.rank == 0 else 0
        self.writer = MetricsWriter(metrics_path, echo_every, self._finalize_row, warnings.observe)
        self._logged: dict[str, PlainValue | torch.Tensor] = {}
        self._step_values: dict[str, PlainValue | torch.Tensor] = {}
        self._pending_copies: list[AsyncCopy] = []
        self._excluded_s = 0.0  # spent since the step began on what is not the step itself
        self._samples_before: list[int] = []

    def _metrics_path(self, index: int) -> Path | None:
        return self._run.metrics_files(self._attempt)[index] if self._run is not None else None

    @property
    def skipped_steps(self) -> int:
        """Steps of the run that were skipped because they were bad, as far as is known."""
        return self.monitor.divergence_policy.skipped if self.monitor is not None else 0

    def layer_stats_for(self, step: int) -> LayerStats | None:
        return self.monitor.layer_stats_for(step) if self.monitor is not None else None

    def log(self, scalars: Mapping[str, Scalar]) -> None:
        """Raises UsageError as :meth:`Session.log`."""
        self._logged.update({name: check_scalar(name, value) for name, value in scalars.items()})

    def has_logged(self, name: str) -> bool:
        """Whether the row of the step under way, or of the last one, has it from :meth:`log`."""
        return name in self._logged

    def exclude_time(self, seconds: float) -> None:
        self._excluded_s += seconds

    def record_step(self, result: StepResult, optimizer: torch.optim.Optimizer) -> None:
        """What goes into the row of the step under way, where the script has not logged the same."""
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
        if result.layers is not None and self.writer.is_active:
            self._pending_copies.append(result.layers)
        if self.monitor is not None:
            self.monitor.record_step(result)
        lr, scale = optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get(LR_SCALE, 1.0)
        self._step_values = {"lr": lr / scale, **({"overflow": 1} if result.overflow else {})}

    def _finalize_row(self, row: dict[str, Any]) -> None:
        """Before a row is written: which samples a step had that was not to be. fp16's loss scale takes care of an
        overflow, whatever the samples are."""
        moments = [row.pop(name) for name in _NONFINITE_COLUMNS if name in row]
        if not moments or self.monitor is None or row.get("overflow"):
            return
        if row["skipped"] or row["spike"]:
            samples_text = self.monitor.describe_samples(row["step"], sole_bad_micro_batch(*moments))
            row.update({BAD_SAMPLES_KEY: samples_text} if samples_text else {})

    def begin_step(self, step: int) -> None:
        """``step``: how many are done."""
        self._logged, self._step_values, self._pending_copies, self._excluded_s = {}, {}, [], 0.0
        for loader in self._loaders:
            loader.wait_s = 0.0
        self._samples_before = [loader.samples_consumed for loader in self._loaders]
        if self.monitor is not None:
            self.monitor.begin_step()
        self._progress.begin_step(step)

    def end_step(self, step: int, tokens: int) -> None:
        """``step``: how many are done now, of ``tokens`` each (0: not known)."""
        if self.monitor is not None:
            self.monitor.end_step(step)
        wait_s = sum(loader.wait_s for loader in self._loaders) if self._loaders else None
        # A loader that was made in the step has begun at none.
        samples_before = [*self._samples_before, *([0] * (len(self._loaders) - len(self._samples_before)))]
        samples = sum(loader.samples_consumed - b for loader, b in zip(self._loaders, samples_before, strict=True))
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
        """The rows to come are of earlier steps: they get a file of their own, since in each the steps rise. What
        the step that was thrown away has told says nothing of an earlier one."""
        self._logged, self._step_values, self._pending_copies = {}, {}, []
        if self._run is not None:
            file_index = len(self._run.metrics_files(self._attempt))
            self.writer.switch_file(self._run.metrics_path(self._attempt, file_index))
