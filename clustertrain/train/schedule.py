"""The learning rate by the step. All kinds are pure functions of it, so that a resume at any step continues them, but
for ``plateau``, whose state is in the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from clustertrain.errors import UsageError
from clustertrain.spec.schedule import ScheduleKind, ScheduleSpec

DEFAULT_WARMUP = 0.02  # of the steps
DEFAULT_COOLDOWN = 0.2  # of the steps: arXiv 2405.18392 finds no gain beyond it
DEFAULT_MILESTONES = (1 / 3, 2 / 3)  # of the steps
LR_SCALE = "lr_scale"  # in a parameter group: what its rate is multiplied by


def warmup_steps(spec: ScheduleSpec, total: int) -> int:
    return spec.warmup_steps if spec.warmup_steps >= 0 else max(1, round(DEFAULT_WARMUP * total))


class LearningRate:
    """Put it into the state of ``session.steps``, and :meth:`apply` it once an optimizer step."""

    def __init__(self, spec: ScheduleSpec, *, peak: float, total: int, higher_is_better: bool = False) -> None:
        """``total``: optimizer steps of the whole run; ``higher_is_better``: of what :meth:`observe` is given."""
        self._spec = spec
        self._peak = peak
        self._total = total
        self._sign = -1.0 if higher_is_better else 1.0
        self._factor = 1.0
        self._best = math.inf  # the lower the better
        self._waited = 0

    def at(self, step: int) -> float:
        """The rate of optimizer step number ``step``, 1 to the total."""
        spec, total = self._spec, self._total
        if spec.kind == "one-cycle":
            return self._peak * _one_cycle(spec, step, total)
        warmup = warmup_steps(spec, total)
        if step < warmup:
            return self._peak * step / warmup
        if spec.kind == "plateau":
            return self._peak * max(self._factor, spec.floor)
        return self._peak * _AFTER_WARMUP[spec.kind](spec, step, warmup, total)

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set the rate of step number ``step`` in all groups, times their ``lr_scale``; returns it without that."""
        rate = self.at(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get(LR_SCALE, 1.0)
        return rate

    @property
    def observes(self) -> bool:
        return self._spec.kind == "plateau"

    def observe(self, value: float) -> None:
        """Tell the result of an evaluation, the same on all ranks. Only ``plateau`` listens.

        Raises:
            UsageError: it is not finite.
        """
        if not self.observes:
            return
        if not math.isfinite(value):
            raise UsageError(
                f"schedule.kind = 'plateau': the validation metric is {value}",
                fix="see why the evaluation gives no number; a schedule cannot follow it",
            )
        now = self._sign * value
        # As torch's ReduceLROnPlateau with threshold_mode "rel", but right for values below 0 too.
        if now < self._best - self._spec.threshold * abs(self._best) or math.isinf(self._best):
            self._best, self._waited = now, 0
            return
        self._waited += 1
        if self._waited > self._spec.patience:
            self._factor, self._waited = self._factor * self._spec.factor, 0

    def state_dict(self) -> dict[str, Any]:
        best = None if math.isinf(self._best) else self._best
        return {"factor": self._factor, "best": best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._factor, self._waited = float(state["factor"]), int(state["waited"])
        self._best = math.inf if state["best"] is None else float(state["best"])


def _progress(step: int, first: int, last: int) -> float:
    """From 0 at ``first`` to 1 at ``last``; where nothing lies between them the last step counts."""
    return min(1.0, max(0.0, (step - first) / (last - first))) if last > first else float(step > last)


def _half_cosine(progress: float) -> float:
    """From 1 down to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _cosine(spec: ScheduleSpec, step: int, warmup: int, total: int) -> float:
    """arXiv 1608.03983, equation 5, without restarts."""
    return spec.floor + (1.0 - spec.floor) * _half_cosine(_progress(step, warmup, total))


def _linear(spec: ScheduleSpec, step: int, warmup: int, total: int) -> float:
    return 1.0 - (1.0 - spec.floor) * _progress(step, warmup, total)


def _steps(spec: ScheduleSpec, step: int, warmup: int, total: int) -> float:
    at = spec.milestones or tuple(round(share * total) for share in DEFAULT_MILESTONES)
    return spec.gamma ** sum(step > milestone for milestone in at)


def _wsd(spec: ScheduleSpec, step: int, warmup: int, total: int) -> float:
    """Warmup, stable, decay: arXiv 2404.06395, section 4."""
    cooldown = spec.cooldown_steps if spec.cooldown_steps >= 0 else round(DEFAULT_COOLDOWN * total)
    return 1.0 - (1.0 - spec.floor) * _progress(step, max(warmup, total - cooldown), total)


def _constant(spec: ScheduleSpec, step: int, warmup: int, total: int) -> float:
    return 1.0


def _one_cycle(spec: ScheduleSpec, step: int, total: int) -> float:
    """arXiv 1708.07120, with cosines as torch's OneCycleLR: from ``initial`` up to 1, then down to ``initial x
    final``. The first step has the first rate and the last step the last."""
    top = max(1, round(spec.rise * total))
    if step < top:
        return 1.0 - (1.0 - spec.initial) * _half_cosine(_progress(step, 1, top))
    last = spec.initial * spec.final
    return last + (1.0 - last) * _half_cosine(_progress(step, top, total))


_AFTER_WARMUP: Mapping[ScheduleKind, Callable[[ScheduleSpec, int, int, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "step": _steps,
    "wsd": _wsd,
    "constant": _constant,
}
