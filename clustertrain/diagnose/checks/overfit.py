"""Check that the model can memorize eight samples.

This quickly tests model, loss, gradients and optimizer together: a model that cannot do it cannot learn more samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding, Plot, Verdict
from clustertrain.diagnose.subject import Subject, disable_dropout, load_batch, repeat_batch
from clustertrain.train.optim.lr_schedule import set_lr

STEPS = 300
# Fractions of the first loss:
PASS_FRACTION = 0.1
STOP_FRACTION = 0.01  # further steps would show nothing more
WARN_FRACTION = 0.5
MIN_FALL = 0.02  # a smaller fall does not count
NOISY_SPREAD = 0.25  # between the largest and smallest loss of the last steps
LR_FACTORS = (1.0, 10.0, 0.1)  # of optim.lr, tried until one passes


@dataclass(frozen=True)
class OverfitTrial:
    """One training on the same batch at one learning rate."""

    lr: float
    losses: list[float]
    floor: float
    """The lowest possible loss."""

    @property
    def initial_loss(self) -> float:
        return self.losses[0] - self.floor

    @property
    def remaining_fraction(self) -> float:
        """Return the median loss of the last tenth of the steps over the first loss, both measured from the floor."""
        tail = sorted(self.losses[-max(1, len(self.losses) // 10) :])
        if not all(map(math.isfinite, (self.initial_loss, *tail))):
            return math.inf
        return (tail[len(tail) // 2] - self.floor) / self.initial_loss if self.initial_loss > 0 else 0.0


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    """Train on one batch without dropout, weight decay, augmentation and label smoothing."""
    unregularized, trials = subject.without_regularization(), []
    for i, factor in enumerate(LR_FACTORS):
        trials.append(_run_trial(unregularized, subject.recipe.optim.lr * factor, on_progress, i))
        if trials[-1].remaining_fraction <= PASS_FRACTION:
            break
    best = min(trials, key=lambda trial: trial.remaining_fraction)
    verdict, text, fix = assess(trials, subject.small_sample_count)
    evidence: dict[str, Any] = {
        "samples": subject.small_sample_count,
        "floor": best.floor,
        "trials": [
            {
                "lr": trial.lr,
                "steps": len(trial.losses),
                "first_loss": trial.losses[0],
                "last_loss": trial.losses[-1],
                "remaining_fraction": trial.remaining_fraction,
            }
            for trial in trials
        ],
        "losses": best.losses,
    }
    rows = [
        (
            f"lr {trial.lr:.3g}",
            f"{trial.losses[0]:.4g} to {trial.losses[-1]:.4g} in {len(trial.losses)} steps"
            f" ({trial.remaining_fraction:.1%} remains)",
        )
        for trial in trials
    ]
    x = [float(i) for i in range(len(best.losses))]
    plot = Plot(x_name="step", y_name="loss", x=x, y=best.losses)
    return Finding(check="overfit", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows, plot=plot)


def _run_trial(subject: Subject, lr: float, on_progress: ProgressCallback, trial_index: int) -> OverfitTrial:
    losses: list[float] = []
    with subject.with_overrides(optim={"lr": lr}).trainer() as trainer:
        disable_dropout(trainer.model)
        batch = load_batch(trainer, subject.recipe, subject.small_sample_count)
        repeated = repeat_batch(trainer, batch)
        floor = _loss_floor(batch[1])
        for i in range(STEPS):
            set_lr(trainer.optimizer, lr)
            losses.append(repeated.step().loss.item())
            on_progress(trial_index * STEPS + i + 1, len(LR_FACTORS) * STEPS)
            if not math.isfinite(losses[-1]) or losses[-1] - floor <= STOP_FRACTION * (losses[0] - floor):
                break
    return OverfitTrial(lr, losses, floor)


def _loss_floor(target: Any) -> float:
    """Return the lowest possible loss: the entropy of targets that are probabilities, otherwise 0."""
    if isinstance(target, torch.Tensor) and target.is_floating_point() and target.dim() > 1:
        sums = target.sum(-1)
        if bool((target >= 0).all()) and bool(torch.isclose(sums, torch.ones_like(sums)).all()):
            return float(-torch.special.xlogy(target, target).sum(-1).mean())
    return 0.0


def assess(trials: list[OverfitTrial], samples: int) -> tuple[Verdict, str, str]:
    """Return (verdict, text, fix) for the trials, the first of which used the recipe's learning rate."""
    best, configured = min(trials, key=lambda trial: trial.remaining_fraction), trials[0]
    samples_text = f"{samples} samples"
    if configured.remaining_fraction <= PASS_FRACTION:
        return "pass", f"{samples_text} are memorized in {len(configured.losses)} steps", ""
    if best.remaining_fraction <= PASS_FRACTION:
        text = (
            f"{samples_text} are memorized at lr = {best.lr:.3g}; at optim.lr = {configured.lr:.3g},"
            f" {configured.remaining_fraction:.0%} of the loss remains"
        )
        return "warn", text, "find the learning rate with `clustertrain diagnose lr-range`"
    if best.remaining_fraction <= WARN_FRACTION:
        text = (
            f"the loss of {samples_text} falls, but {best.remaining_fraction:.0%} of it remains after"
            f" {len(best.losses)} steps"
        )
        fix = "look for a model that is too small, a clipped loss, or equal inputs with different targets"
        return "warn", text, fix
    if not math.isfinite(best.remaining_fraction):
        fix = "run `clustertrain diagnose gradients`, and look for a log or a root of 0"
        return "fail", f"the loss of {samples_text} becomes NaN or Inf at every rate", fix
    tail = best.losses[-len(best.losses) // 4 :]
    if max(tail) - min(tail) > NOISY_SPREAD * best.losses[0]:
        return (
            "fail",
            f"the loss of {samples_text} jumps and does not fall, at {len(trials)} rates",
            (
                "look for randomness in the step (custom dropout, noise) or a gradient with the wrong sign: run "
                "`clustertrain diagnose gradients`"
            ),
        )
    if best.remaining_fraction >= 1 - MIN_FALL:
        return (
            "fail",
            f"the loss of {samples_text} does not change",
            (
                "look for detach(), .item(), no_grad, argmax and frozen parameters; run `clustertrain diagnose modes`: "
                "either the targets do not affect the loss, or the gradients do not reach the parameters"
            ),
        )
    return (
        "fail",
        f"the loss of {samples_text} barely falls: {best.remaining_fraction:.0%} of it remains",
        (
            "look for equal inputs with different targets, a model that ignores its input, or wrong gradients: "
            "run `clustertrain diagnose gradients` and `data`"
        ),
    )
