"""Learning rate as a function of the step; the plan shows it and the trainer sets it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from clustertrain.config.schedule import ScheduleKind, ScheduleSpec

DEFAULT_MILESTONES = (1 / 3, 2 / 3)  # of the steps


def resolve_milestones(spec: ScheduleSpec, total: int) -> tuple[int, ...]:
    """Return the milestones of the ``step`` schedule."""
    return spec.milestones or tuple(round(fraction * total) for fraction in DEFAULT_MILESTONES)


def peak_step(spec: ScheduleSpec, total: int) -> int:
    """Return the step at which ``one-cycle`` reaches the peak."""
    return max(1, round(spec.rise * total))


def lr_at_step(spec: ScheduleSpec, step: int, total: int, *, peak: float, plateau_factor: float = 1.0) -> float:
    """Return the learning rate of optimizer step ``step``, 1 to ``total``.

    Args:
        plateau_factor: current rate of ``plateau`` as a fraction of the peak.
    """
    if spec.kind == "one-cycle":
        return peak * _one_cycle(spec, step, total)
    warmup = spec.resolve_warmup_steps(total)
    if step < warmup:
        return peak * step / warmup
    if spec.kind == "plateau":
        return peak * max(plateau_factor, spec.floor)
    return peak * _DECAY_BY_KIND[spec.kind](spec, step, warmup, total)


def momentum_at_step(spec: ScheduleSpec, step: int, total: int) -> float:
    """Return the momentum of ``one-cycle`` in optimizer step ``step``, 1 to ``total``, as in torch's OneCycleLR.

    It falls from ``max_momentum`` to ``min_momentum`` while the rate rises, and returns while the rate falls.
    """
    peak_at, span = peak_step(spec, total), spec.max_momentum - spec.min_momentum
    if step < peak_at:
        return spec.min_momentum + span * _half_cosine(_progress(step, 1, peak_at))
    return spec.max_momentum - span * _half_cosine(_progress(step, peak_at, total))


def _progress(step: int, first: int, last: int) -> float:
    """Return the progress from 0 at ``first`` to 1 at ``last``; a step function at ``last`` if they are equal."""
    return min(1.0, max(0.0, (step - first) / (last - first))) if last > first else float(step > last)


def _half_cosine(progress: float) -> float:
    """Return a half cosine from 1 at progress 0 to 0 at progress 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _cosine(spec: ScheduleSpec, step: int, warmup: int, total: int) -> float:
    """Return the factor of cosine annealing without restarts (arXiv 1608.03983, equation 5)."""
    return spec.floor + (1.0 - spec.floor) * _half_cosine(_progress(step, warmup, total))


def _linear(spec: ScheduleSpec, step: int, warmup: int, total: int) -> float:
    return 1.0 - (1.0 - spec.floor) * _progress(step, warmup, total)


def _step_decay(spec: ScheduleSpec, step: int, warmup: int, total: int) -> float:
    return spec.gamma ** sum(step > milestone for milestone in resolve_milestones(spec, total))


def _wsd(spec: ScheduleSpec, step: int, warmup: int, total: int) -> float:
    """Return the factor of warmup, stable, decay (arXiv 2404.06395, section 4)."""
    return 1.0 - (1.0 - spec.floor) * _progress(step, max(warmup, total - spec.resolve_cooldown_steps(total)), total)


def _constant(spec: ScheduleSpec, step: int, warmup: int, total: int) -> float:
    return 1.0


def _one_cycle(spec: ScheduleSpec, step: int, total: int) -> float:
    """Return the factor of one-cycle (arXiv 1708.07120) with cosines, as in torch's OneCycleLR.

    It rises from ``initial`` in the first step to 1 and falls to ``initial x final`` in the last step.
    """
    peak_at = peak_step(spec, total)
    if step < peak_at:
        return 1.0 - (1.0 - spec.initial) * _half_cosine(_progress(step, 1, peak_at))
    final_factor = spec.initial * spec.final
    return final_factor + (1.0 - final_factor) * _half_cosine(_progress(step, peak_at, total))


_DECAY_BY_KIND: Mapping[ScheduleKind, Callable[[ScheduleSpec, int, int, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "step": _step_decay,
    "wsd": _wsd,
    "constant": _constant,
}
