"""Whether the model can learn eight samples by heart. It tries model, loss, gradients and optimizer together, in little
time: what cannot do this will not learn more of them either."""

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
PASS_FRACTION = 0.1  # of the first loss
STOP_FRACTION = 0.01  # of it: the rest of the steps would show nothing more
WARN_FRACTION = 0.5
MIN_FALL = 0.02  # of the first loss; a fall by less is none
LR_FACTORS = (1.0, 10.0, 0.1)  # times optim.lr, until one of them gets there
NOISY_SPREAD = 0.25  # of the first loss, of the last steps' spread


@dataclass(frozen=True)
class OverfitTrial:
    lr: float
    losses: list[float]
    floor: float

    @property
    def initial_loss(self) -> float:
        return self.losses[0] - self.floor

    @property
    def remaining_fraction(self) -> float:
        """What is left of the first loss, as a fraction; of the last tenth of the steps the middle one."""
        tail = sorted(self.losses[-max(1, len(self.losses) // 10) :])
        if not all(map(math.isfinite, (self.initial_loss, *tail))):
            return math.inf
        return (tail[len(tail) // 2] - self.floor) / self.initial_loss if self.initial_loss > 0 else 0.0


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    """Without dropout, weight decay, augmentation and label smoothing."""
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
        "tries": [
            {
                "lr": a.lr,
                "steps": len(a.losses),
                "first_loss": a.losses[0],
                "last_loss": a.losses[-1],
                "left": a.remaining_fraction,
            }
            for a in trials
        ],
        "losses": best.losses,
    }
    rows = [
        (
            f"lr {a.lr:.3g}",
            f"{a.losses[0]:.4g} to {a.losses[-1]:.4g} in {len(a.losses)} steps ({a.remaining_fraction:.1%} is left)",
        )
        for a in trials
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
    """What the loss cannot fall below: of targets that are probabilities their entropy."""
    if isinstance(target, torch.Tensor) and target.is_floating_point() and target.dim() > 1:
        sums = target.sum(-1)
        if bool((target >= 0).all()) and bool(torch.isclose(sums, torch.ones_like(sums)).all()):
            return float(-torch.special.xlogy(target, target).sum(-1).mean())
    return 0.0


def assess(trials: list[OverfitTrial], samples: int) -> tuple[Verdict, str, str]:
    """(verdict, text, fix) of what each rate has brought."""
    best, configured = min(trials, key=lambda trial: trial.remaining_fraction), trials[0]
    samples_text = f"{samples} samples"
    if configured.remaining_fraction <= PASS_FRACTION:
        return "pass", f"{samples_text} are learned by heart in {len(configured.losses)} steps", ""
    if best.remaining_fraction <= PASS_FRACTION:
        text = (
            f"{samples_text} are learned by heart at lr = {best.lr:.3g}; at optim.lr = {configured.lr:.3g}"
            f" {configured.remaining_fraction:.0%} of "
        )
        return "warn", f"{text}the loss is left", "find the rate with `clustertrain diagnose lr-range`"
    if best.remaining_fraction <= WARN_FRACTION:
        text = (
            f"the loss of {samples_text} falls, but {best.remaining_fraction:.0%} of it is left after"
            f" {len(best.losses)} steps"
        )
        return "warn", text, "a model that is too small, a loss that clips, or samples with one input and two targets"
    if not math.isfinite(best.remaining_fraction):
        fix = "see `clustertrain diagnose gradients`, and look for a log or a root of 0"
        return "fail", f"the loss of {samples_text} is not finite at any rate", fix
    tail = best.losses[-len(best.losses) // 4 :]
    if max(tail) - min(tail) > NOISY_SPREAD * best.losses[0]:
        return (
            "fail",
            f"the loss of {samples_text} jumps and does not fall, at {len(trials)} rates",
            (
                "something random in the step (dropout of one's own, noise), or a gradient with a wrong sign: see "
                "`clustertrain diagnose gradients`"
            ),
        )
    if best.remaining_fraction >= 1 - MIN_FALL:
        return (
            "fail",
            f"the loss of {samples_text} stays where it is",
            (
                "the targets do not reach the loss or the gradient not the parameters: look for detach(), .item(), "
                "no_grad, argmax, frozen parameters; see `clustertrain diagnose modes`"
            ),
        )
    return (
        "fail",
        f"the loss of {samples_text} hardly falls: {best.remaining_fraction:.0%} of it is left",
        (
            "inputs with one value and several targets, a model that cannot see its input, or wrong gradients: "
            "see `clustertrain diagnose gradients` and `data`"
        ),
    )
