"""The row of each step: what the script logs, what the session measures, what the step's own figures are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from clustertrain.config.recipe import TrainSpec
from clustertrain.run.run_dir import RunDir
from clustertrain.train.core.async_copy import Arriving
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.memory import allocated_gib, peak_allocated_gib
from clustertrain.train.core.step_types import StepResult, sole_bad_micro_batch
from clustertrain.train.data.loader import Loader
from clustertrain.train.optim.lr_schedule import LR_SCALE
from clustertrain.train.session.heartbeat import Marks
from clustertrain.train.session.metrics_writer import Metrics, Plain, Scalar, checked
from clustertrain.train.stability.layer_stats import Layers
from clustertrain.train.stability.monitor import Watch
from clustertrain.train.stability.warnings import BAD_SAMPLES, Warnings

_GIB = 1 << 30
_BAD = ("_bad", "_bad_numbers", "_bad_squares")  # arrive with a row, and are not in it


class Recorder:
    """``metrics`` has a file on rank 0 of a run; outside a run rank 0 prints its rows. ``watch``: what watches over the
    steps, where the session does them."""

    def __init__(self, context: RankContext, marks: Marks, loaders: Sequence[Loader], warnings: Warnings) -> None:
        """``loaders``: a list that may grow."""
        self._device = context.device
        self._loaders = loaders
        self._marks = marks
        self._log_every = context.spec.recipe.train.log_every if context.spec else TrainSpec().log_every
        recording = context.rank == 0 and context.run is not None and context.attempt is not None
        self._run: RunDir | None = context.run if recording else None
        self._attempt = context.attempt.n if context.attempt is not None else 0
        path = self._path(-1)
        marks.continue_rows(path)
        self.watch: Watch | None = None
        echo_every = self._log_every if context.rank == 0 else 0
        self.metrics = Metrics(path, echo_every, self._complete, warnings.see)
        self._logged: dict[str, Plain | torch.Tensor] = {}
        self._own: dict[str, Plain | torch.Tensor] = {}
        self._coming: list[Arriving] = []
        self._apart_s = 0.0  # spent since the step began on what is not the step itself
        self._before: list[int] = []

    def _path(self, which: int) -> Path | None:
        return self._run.metrics_files(self._attempt)[which] if self._run is not None else None

    @property
    def skipped(self) -> int:
        """Steps of the run that were skipped because they were bad, as far as is known."""
        return self.watch.supervisor.skipped if self.watch is not None else 0

    def looks_at_layers(self, step: int) -> Layers | None:
        return self.watch.looks_at_layers(step) if self.watch is not None else None

    def log(self, scalars: Mapping[str, Scalar]) -> None:
        """Raises UsageError as :meth:`Session.log`."""
        self._logged.update({name: checked(name, value) for name, value in scalars.items()})

    def has_logged(self, name: str) -> bool:
        """Whether the row of the step under way, or of the last one, has it from :meth:`log`."""
        return name in self._logged

    def apart(self, seconds: float) -> None:
        self._apart_s += seconds

    def stepped(self, done: StepResult, optimizer: torch.optim.Optimizer) -> None:
        """What goes into the row of the step under way, where the script has not logged the same."""
        names = ("loss", "grad_norm", "clipped", "clip_fraction", "skipped", "spike", *_BAD)
        figures = (
            done.loss,
            done.grad_norm,
            done.clipped.int(),
            done.clip_fraction,
            done.skipped.int(),
            done.spike.int(),
            *done.bad,
        )
        self._coming = [Arriving(names, figures)] if self.metrics.active else []
        if done.layers is not None and self.metrics.active:
            self._coming.append(done.layers)
        if self.watch is not None:
            self.watch.stepped(done)
        lr, scale = optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get(LR_SCALE, 1.0)
        self._own = {"lr": lr / scale, **({"overflow": 1} if done.overflow else {})}

    def _complete(self, row: dict[str, Any]) -> None:
        """Before a row is written: which samples a step had that was not to be. fp16's loss scale takes care of an
        overflow, whatever the samples are."""
        bad = [row.pop(name) for name in _BAD if name in row]
        if not bad or self.watch is None or row.get("overflow"):
            return
        if row["skipped"] or row["spike"]:
            named = self.watch.named(row["step"], sole_bad_micro_batch(*bad))
            row.update({BAD_SAMPLES: named} if named else {})

    def begin(self, step: int) -> None:
        """``step``: how many are done."""
        self._logged, self._own, self._coming, self._apart_s = {}, {}, [], 0.0
        for loader in self._loaders:
            loader.wait_s = 0.0
        self._before = [loader.taken for loader in self._loaders]
        if self.watch is not None:
            self.watch.step_begins()
        self._marks.step_begins(step)

    def end(self, step: int, tokens: int) -> None:
        """``step``: how many are done now, of ``tokens`` each (0: not known)."""
        if self.watch is not None:
            self.watch.step_ends(step)
        wait_s = sum(loader.wait_s for loader in self._loaders) if self._loaders else None
        # A loader that was made in the step has begun at none.
        before = [*self._before, *([0] * (len(self._loaders) - len(self._before)))]
        samples = sum(loader.taken - b for loader, b in zip(self._loaders, before, strict=True))
        plain = self._marks.step_ends(step, self._apart_s, tokens, wait_s, samples)
        plain.update(self._memory(step))
        if self.skipped:
            plain["sum_skipped"] = self.skipped
        self.metrics.put(plain, {**self._own, **self._logged}, self._coming)

    def _memory(self, step: int) -> dict[str, float]:
        told = bool(self._log_every) and step % self._log_every == 0
        if self._device.type != "cuda":
            return {"rss_gib": psutil.Process().memory_info().rss / _GIB} if told else {}
        found = {"allocated_gib": allocated_gib(self._device)}
        if told:
            found["peak_allocated_gib"] = peak_allocated_gib(self._device) or 0.0
        return found

    def went_back(self) -> None:
        """The rows to come are of earlier steps: they get a file of their own, since in each the steps rise. What
        the step that was thrown away has told says nothing of an earlier one."""
        self._logged, self._own, self._coming = {}, {}, []
        if self._run is not None:
            stretch = len(self._run.metrics_files(self._attempt))
            self.metrics.go_on_in(self._run.metrics_of(self._attempt, stretch))
