"""The learning rate of a run.

All schedules are pure functions of the step (:mod:`clustertrain.plan.lr_schedule`), so a resume at any step continues
them, except ``plateau``, whose state is in the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from clustertrain.config.schedule import ScheduleSpec
from clustertrain.errors import UsageError
from clustertrain.plan import lr_schedule

LR_SCALE = "lr_scale"  # key in a parameter group: factor of its learning rate


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to ``lr`` times the group's ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_SCALE, 1.0)


def set_momentum(optimizer: torch.optim.Optimizer, momentum: float) -> None:
    """Set the momentum, or the first beta, of every group that has one. A momentum of 0 stays 0."""
    for group in optimizer.param_groups:
        if group.get("momentum"):
            group["momentum"] = momentum
        if "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])


def unscaled_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate without the groups' ``lr_scale``, as passed to :func:`set_lr`."""
    groups = optimizer.param_groups
    # A group without scaling has the exact value; a division may round it.
    group = next((g for g in groups if g.get(LR_SCALE) == 1.0), groups[0])
    lr: float = group["lr"] / group.get(LR_SCALE, 1.0)
    return lr


class LearningRate:
    """Learning-rate schedule. Pass it in the state of ``session.steps``, and call :meth:`apply` once per optimizer
    step."""

    def __init__(self, spec: ScheduleSpec, *, peak: float, total: int, higher_is_better: bool = False) -> None:
        """Create the schedule for a run of ``total`` optimizer steps.

        Args:
            higher_is_better: direction of the metric passed to :meth:`observe`.
        """
        self._spec = spec
        self._peak = peak
        self._total = total
        self._sign = -1.0 if higher_is_better else 1.0
        self._factor = 1.0
        self._best = math.inf  # lower is better
        self._bad_evals = 0

    def at(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, from 1 to the total."""
        return lr_schedule.lr_at_step(self._spec, step, self._total, peak=self._peak, plateau_factor=self._factor)

    def momentum_at(self, step: int) -> float | None:
        """Return the momentum of optimizer step ``step``; None if the schedule does not change it."""
        if self._spec.kind != "one-cycle" or not self._spec.cycle_momentum:
            return None
        return lr_schedule.momentum_at_step(self._spec, step, self._total)

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set each group's learning rate for optimizer step ``step``, times its ``lr_scale``, and its momentum if the
        schedule cycles it."""
        set_lr(optimizer, self.at(step))
        momentum = self.momentum_at(step)
        if momentum is not None:
            set_momentum(optimizer, momentum)

    @property
    def is_metric_driven(self) -> bool:
        """Whether the schedule depends on validation results."""
        return self._spec.kind == "plateau"

    def observe(self, value: float) -> None:
        """Record an evaluation result, which must be the same on all ranks. Only ``plateau`` uses it.

        Raises:
            UsageError: the value is NaN or Inf.
        """
        if not self.is_metric_driven:
            return
        if not math.isfinite(value):
            raise UsageError(
                f"schedule.kind = 'plateau': the validation metric is {value}",
                fix="find out why the evaluation returns NaN or Inf; the schedule cannot use such a value",
            )
        signed_value = self._sign * value
        # Like torch's ReduceLROnPlateau with threshold_mode "rel", but also correct for negative values.
        if signed_value < self._best - self._spec.threshold * abs(self._best) or math.isinf(self._best):
            self._best, self._bad_evals = signed_value, 0
            return
        self._bad_evals += 1
        if self._bad_evals > self._spec.patience:
            self._factor, self._bad_evals = self._factor * self._spec.factor, 0

    def state_dict(self) -> dict[str, Any]:
        best = None if math.isinf(self._best) else self._best
        return {"factor": self._factor, "best": best, "waited": self._bad_evals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._factor, self._bad_evals = float(state["factor"]), int(state["waited"])
        self._best = math.inf if state["best"] is None else float(state["best"])
