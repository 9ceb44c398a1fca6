"""The learning-rate range test (Smith, "Cyclical Learning Rates for Training Neural Networks", arXiv 1506.01186,
section 3.3): the rate grows exponentially from step to step, and where the loss turns up it is too high. Then short
trainings at rates around the suggestion."""

from __future__ import annotations

import math
import statistics
from typing import Any

from clustertrain.diagnose.child_output import Tell
from clustertrain.diagnose.registry import Finding, Plot, Verdict
from clustertrain.diagnose.subject import Subject, set_rate

LOWEST, HIGHEST = 1e-7, 10.0
STEPS = 120  # of the sweep, fifteen a decade
SMOOTHING = 0.8  # of the running mean of the loss
TOO_HIGH = 1.5  # times the lowest smoothed loss, of what fell: the end of the sweep
SAFE = 0.1  # of the rate at which the loss turns up
AROUND = (0.1, 10**-0.5, 1.0, 10**0.5, 10.0)  # times the suggestion: rates of the short trainings
SHORT = 40  # steps of each
FALL = 0.02  # of the first loss: a fall by less is none
STILL = 1e-5  # rates below it change no loss that could be seen: what it does there is noise
RISE = 1.1  # times the first loss, of a short training
HIGH, LOW = 10.0, 0.01  # optim.lr against the suggestion


def check(subject: Subject, tell: Tell) -> Finding:
    subject = subject.changed(data={"workers": 0})
    total = STEPS + (len(AROUND) + 1) * SHORT
    rates, losses = _sweep(subject, lambda done: tell(done, total))
    smooth = smoothed(losses)
    turn = turning_point(rates, losses)
    evidence: dict[str, Any] = {"lr": subject.recipe.optim.lr, "rates": rates, "losses": losses, "smoothed": smooth}
    marks = {"optim.lr": subject.recipe.optim.lr}
    rows, short = [], {}
    if turn is not None:
        suggestion = SAFE * turn
        marks |= {"suggestion": suggestion, "turns up": turn}
        for i, rate in enumerate(sorted({*(suggestion * f for f in AROUND), subject.recipe.optim.lr})):
            begun = STEPS + i * SHORT
            short[rate] = _short(subject, rate, lambda done, begun=begun: tell(begun + done, total))
        evidence |= {"turns_up_at": turn, "suggestion": suggestion}
        evidence["short_trainings"] = [{"lr": r, "first_loss": a, "last_loss": b} for r, (a, b) in short.items()]
        rows.append(("turns up at", f"{turn:.2g}; a tenth of it, {suggestion:.2g}, is the suggestion"))
        rows += [
            (f"lr {r:.2g}", f"{a:.4g} to {b:.4g} in {SHORT} steps{_name(r, marks)}") for r, (a, b) in short.items()
        ]
    verdict, text, fix = judged(subject.recipe.optim.lr, turn, smooth, short)
    plot = Plot(x_name="lr", y_name="loss", x=rates, y=smooth, log_x=True, marks=marks)
    return Finding(check="lr-range", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows, plot=plot)


def _name(rate: float, marks: dict[str, float]) -> str:
    return "".join(f"  <- {name}" for name, at in marks.items() if math.isclose(at, rate))


def _sweep(subject: Subject, tell: Any) -> tuple[list[float], list[float]]:
    """Rates and losses, up to where the loss is lost for good."""
    rates: list[float] = []
    losses: list[float] = []
    with subject.trainer() as t:
        for i in range(STEPS):
            rate = LOWEST * (HIGHEST / LOWEST) ** (i / (STEPS - 1))
            set_rate(t.optimizer, rate)
            loss = t.step().loss.item()
            tell(i + 1)
            if not math.isfinite(loss):
                break
            rates.append(rate)
            losses.append(loss)
            if lost(smoothed(losses)):
                break
    return rates, losses


def _short(subject: Subject, rate: float, tell: Any) -> tuple[float, float]:
    """The loss of the first step and the mean of the last quarter of a short training, inf where it was lost."""
    losses: list[float] = []
    with subject.changed(optim={"lr": rate}).trainer() as t:
        for i in range(SHORT):
            set_rate(t.optimizer, rate)
            losses.append(t.step().loss.item())
            tell(i + 1)
            if not math.isfinite(losses[-1]):
                return losses[0], math.inf
    tail = losses[-SHORT // 4 :]
    return losses[0], sum(tail) / len(tail)


def smoothed(losses: list[float]) -> list[float]:
    """A running mean that forgets, without the pull towards 0 of its first values."""
    mean, found = 0.0, []
    for i, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        found.append(mean / (1 - SMOOTHING**i))
    return found


def lost(smooth: list[float]) -> bool:
    """Whether the loss has risen so far above its lowest that no higher rate can bring it back."""
    least = min(smooth)
    return smooth[-1] > max(TOO_HIGH * smooth[0], least + TOO_HIGH * (smooth[0] - least)) and len(smooth) > 10


def noise(rates: list[float], losses: list[float]) -> float:
    """The standard deviation of the loss from batch to batch."""
    still = [loss for rate, loss in zip(rates, losses, strict=True) if rate < STILL]
    return statistics.pstdev(still) if len(still) > 1 else 0.0


def turning_point(rates: list[float], losses: list[float]) -> float | None:
    """The rate at which the smoothed loss is lowest, after which it rises; None where it never falls by more than the
    noise. The highest rate where it never rises."""
    if not losses:
        return None
    smooth = smoothed(losses)
    first = statistics.fmean(losses[: max(1, sum(rate < STILL for rate in rates))])
    least = min(range(len(smooth)), key=smooth.__getitem__)
    # The lowest of some hundred smoothed values lies one standard deviation of the raw ones below by chance.
    if first - smooth[least] < max(FALL * abs(first), noise(rates, losses)):
        return None
    return rates[least]


def judged(
    lr: float, turn: float | None, smooth: list[float], short: dict[float, tuple[float, float]]
) -> tuple[Verdict, str, str]:
    """(verdict, text, fix) of the recipe's rate."""
    if not smooth:
        return "fail", "the loss is not finite at the lowest rate", "see `clustertrain diagnose init-loss` and `data`"
    if turn is None and max(smooth) - min(smooth) < FALL * abs(smooth[0]):
        text = "the loss is the same at all rates"
        return "fail", text, "the optimizer does not reach the model: see `clustertrain diagnose modes` and `overfit`"
    if turn is None:
        text = f"in {len(smooth)} steps the loss falls at no rate by more than it differs from batch to batch"
        fix = (
            "a larger train.micro_batch shows more; where `clustertrain diagnose overfit` fails too, it is not the rate"
        )
        return "warn", text, fix
    suggestion = SAFE * turn
    fix = f"set optim.lr = {suggestion:.1g}"
    begun, ended = short.get(lr, (math.inf, 0.0))
    said = f"optim.lr = {lr:.3g}, the suggestion is {suggestion:.2g}"
    if lr > HIGH * suggestion:
        return "fail", f"{said}: it is {lr / suggestion:.0f} times too high", fix
    if ended > RISE * begun:
        return "warn", f"{said}; in a short training without warmup the loss rises from {begun:.3g} to {ended:.3g}", fix
    if lr < LOW * suggestion:
        return "warn", f"{said}: it is {suggestion / lr:.0f} times lower", f"{fix}, unless it is for fine-tuning"
    return "pass", said, ""
