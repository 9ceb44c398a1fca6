"""Whether the model can learn eight samples by heart. It tries model, loss, gradients and optimizer together, in little
time: what cannot do this will not learn more of them either."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from clustertrain.diagnose.child_output import Tell
from clustertrain.diagnose.registry import Finding, Plot, Verdict
from clustertrain.diagnose.subject import Subject, batch_of, no_dropout, repeating, set_rate

STEPS = 300
NEAR_ZERO = 0.1  # of the first loss
DONE = 0.01  # of it: the rest of the steps would show nothing more
HALF = 0.5
FLAT = 0.02  # of the first loss; a fall by less is none
RATES = (1.0, 10.0, 0.1)  # times optim.lr, until one of them gets there
NOISY = 0.25  # of the first loss, of the last steps' spread


@dataclass(frozen=True)
class Try:
    rate: float
    losses: list[float]
    floor: float

    @property
    def first(self) -> float:
        return self.losses[0] - self.floor

    @property
    def last(self) -> float:
        """What is left of the first loss, as a fraction; of the last tenth of the steps the middle one."""
        tail = sorted(self.losses[-max(1, len(self.losses) // 10) :])
        if not all(map(math.isfinite, (self.first, *tail))):
            return math.inf
        return (tail[len(tail) // 2] - self.floor) / self.first if self.first > 0 else 0.0


def check(subject: Subject, tell: Tell) -> Finding:
    """Without dropout, weight decay, augmentation and label smoothing."""
    quiet, tries = subject.without_noise(), []
    for i, factor in enumerate(RATES):
        tries.append(_try(quiet, subject.recipe.optim.lr * factor, tell, i))
        if tries[-1].last <= NEAR_ZERO:
            break
    best = min(tries, key=lambda found: found.last)
    verdict, text, fix = judged(tries, subject.eight)
    evidence: dict[str, Any] = {
        "samples": subject.eight,
        "floor": best.floor,
        "tries": [
            {"lr": a.rate, "steps": len(a.losses), "first_loss": a.losses[0], "last_loss": a.losses[-1], "left": a.last}
            for a in tries
        ],
        "losses": best.losses,
    }
    rows = [
        (f"lr {a.rate:.3g}", f"{a.losses[0]:.4g} to {a.losses[-1]:.4g} in {len(a.losses)} steps ({a.last:.1%} is left)")
        for a in tries
    ]
    x = [float(i) for i in range(len(best.losses))]
    plot = Plot(x_name="step", y_name="loss", x=x, y=best.losses)
    return Finding(check="overfit", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows, plot=plot)


def _try(subject: Subject, rate: float, tell: Tell, turn: int) -> Try:
    losses: list[float] = []
    with subject.changed(optim={"lr": rate}).trainer() as t:
        no_dropout(t.model)
        batch = batch_of(t, subject.recipe, subject.eight)
        steps = repeating(t, batch)
        floor = _floor(batch[1])
        for i in range(STEPS):
            set_rate(t.optimizer, rate)
            losses.append(steps.step().loss.item())
            tell(turn * STEPS + i + 1, len(RATES) * STEPS)
            if not math.isfinite(losses[-1]) or losses[-1] - floor <= DONE * (losses[0] - floor):
                break
    return Try(rate, losses, floor)


def _floor(target: Any) -> float:
    """What the loss cannot fall below: of targets that are probabilities their entropy."""
    if isinstance(target, torch.Tensor) and target.is_floating_point() and target.dim() > 1:
        sums = target.sum(-1)
        if bool((target >= 0).all()) and bool(torch.isclose(sums, torch.ones_like(sums)).all()):
            return float(-torch.special.xlogy(target, target).sum(-1).mean())
    return 0.0


def judged(tries: list[Try], samples: int) -> tuple[Verdict, str, str]:
    """(verdict, text, fix) of what each rate has brought."""
    best, own = min(tries, key=lambda found: found.last), tries[0]
    what = f"{samples} samples"
    if own.last <= NEAR_ZERO:
        return "pass", f"{what} are learned by heart in {len(own.losses)} steps", ""
    if best.last <= NEAR_ZERO:
        text = f"{what} are learned by heart at lr = {best.rate:.3g}; at optim.lr = {own.rate:.3g} {own.last:.0%} of "
        return "warn", f"{text}the loss is left", "find the rate with `clustertrain diagnose lr-range`"
    if best.last <= HALF:
        text = f"the loss of {what} falls, but {best.last:.0%} of it is left after {len(best.losses)} steps"
        return "warn", text, "a model that is too small, a loss that clips, or samples with one input and two targets"
    if not math.isfinite(best.last):
        fix = "see `clustertrain diagnose gradients`, and look for a log or a root of 0"
        return "fail", f"the loss of {what} is not finite at any rate", fix
    tail = best.losses[-len(best.losses) // 4 :]
    if max(tail) - min(tail) > NOISY * best.losses[0]:
        return (
            "fail",
            f"the loss of {what} jumps and does not fall, at {len(tries)} rates",
            (
                "something random in the step (dropout of one's own, noise), or a gradient with a wrong sign: see "
                "`clustertrain diagnose gradients`"
            ),
        )
    if best.last >= 1 - FLAT:
        return (
            "fail",
            f"the loss of {what} stays where it is",
            (
                "the targets do not reach the loss or the gradient not the parameters: look for detach(), .item(), "
                "no_grad, argmax, frozen parameters; see `clustertrain diagnose modes`"
            ),
        )
    return (
        "fail",
        f"the loss of {what} hardly falls: {best.last:.0%} of it is left",
        (
            "inputs with one value and several targets, a model that cannot see its input, or wrong gradients: "
            "see `clustertrain diagnose gradients` and `data`"
        ),
    )
