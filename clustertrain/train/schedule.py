"""The learning rate as a pure function of the step: nothing to save, nothing to restore wrongly."""

from __future__ import annotations

import math

from clustertrain.spec.recipe import ScheduleSpec

DEFAULT_WARMUP = 0.02  # of the steps


def warmup_steps(spec: ScheduleSpec, total: int) -> int:
    return spec.warmup_steps if spec.warmup_steps >= 0 else max(1, round(DEFAULT_WARMUP * total))


def warmup_cosine(step: int, total: int, *, peak: float, warmup: int, floor: float) -> float:
    """The rate of optimizer step number ``step`` (1 to ``total``): linear to ``peak`` at step ``warmup``, then half a
    cosine down to ``floor * peak`` at ``total``, and constant after."""
    if step < warmup:
        return peak * step / warmup
    if total <= warmup or step >= total:
        return peak * (floor if step >= total > warmup else 1.0)
    progress = (step - warmup) / (total - warmup)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
