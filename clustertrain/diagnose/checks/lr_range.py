"""The learning-rate range test (Smith, "Cyclical Learning Rates for Training Neural Networks", arXiv 1506.01186,
section 3.3): the rate grows exponentially from step to step, and where the loss turns up it is too high. Then short
trainings at rates around the suggestion."""

from __future__ import annotations

import math
import statistics
from typing import Any

from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding, Plot, Verdict
from clustertrain.diagnose.subject import Subject
from clustertrain.train.optim.lr_schedule import set_lr

MIN_LR, MAX_LR = 1e-7, 10.0
SWEEP_STEPS = 120  # of the sweep, fifteen a decade
SMOOTHING = 0.8  # of the running mean of the loss
DIVERGENCE_FACTOR = 1.5  # times the lowest smoothed loss, of what fell: the end of the sweep
SUGGESTION_FACTOR = 0.1  # of the rate at which the loss turns up
TRIAL_FACTORS = (0.1, 10**-0.5, 1.0, 10**0.5, 10.0)  # times the suggestion: rates of the short trainings
TRIAL_STEPS = 40  # steps of each
MIN_FALL = 0.02  # of the first loss: a fall by less is none
NEGLIGIBLE_LR = 1e-5  # rates below it change no loss that could be seen: what it does there is noise
MAX_RISE = 1.1  # times the first loss, of a short training
HIGH_FACTOR, LOW_FACTOR = 10.0, 0.01  # optim.lr against the suggestion


def check(subject: Subject, on_progress: ProgressCallback) -> Finding:
    subject = subject.with_overrides(data={"workers": 0})
    total = SWEEP_STEPS + (len(TRIAL_FACTORS) + 1) * TRIAL_STEPS
    rates, losses = _run_sweep(subject, lambda completed: on_progress(completed, total))
    smoothed_losses = smooth_losses(losses)
    turning_lr = find_turning_point(rates, losses)
    evidence: dict[str, Any] = {
        "lr": subject.recipe.optim.lr,
        "rates": rates,
        "losses": losses,
        "smoothed": smoothed_losses,
    }
    marks = {"optim.lr": subject.recipe.optim.lr}
    rows, trials = [], {}
    if turning_lr is not None:
        suggestion = SUGGESTION_FACTOR * turning_lr
        marks |= {"suggestion": suggestion, "turns up": turning_lr}
        for i, rate in enumerate(sorted({*(suggestion * f for f in TRIAL_FACTORS), subject.recipe.optim.lr})):
            offset = SWEEP_STEPS + i * TRIAL_STEPS
            trials[rate] = _run_trial(
                subject, rate, lambda completed, offset=offset: on_progress(offset + completed, total)
            )
        evidence |= {"turns_up_at": turning_lr, "suggestion": suggestion}
        evidence["short_trainings"] = [{"lr": r, "first_loss": a, "last_loss": b} for r, (a, b) in trials.items()]
        rows.append(("turns up at", f"{turning_lr:.2g}; a tenth of it, {suggestion:.2g}, is the suggestion"))
        rows += [
            (f"lr {r:.2g}", f"{a:.4g} to {b:.4g} in {TRIAL_STEPS} steps{_mark_suffix(r, marks)}")
            for r, (a, b) in trials.items()
        ]
    verdict, text, fix = assess(subject.recipe.optim.lr, turning_lr, smoothed_losses, trials)
    plot = Plot(x_name="lr", y_name="loss", x=rates, y=smoothed_losses, log_x=True, marks=marks)
    return Finding(check="lr-range", verdict=verdict, text=text, fix=fix, evidence=evidence, rows=rows, plot=plot)


def _mark_suffix(rate: float, marks: dict[str, float]) -> str:
    return "".join(f"  <- {name}" for name, value in marks.items() if math.isclose(value, rate))


def _run_sweep(subject: Subject, on_progress: Any) -> tuple[list[float], list[float]]:
    """Rates and losses, up to where the loss is lost for good."""
    rates: list[float] = []
    losses: list[float] = []
    with subject.trainer() as trainer:
        for i in range(SWEEP_STEPS):
            rate = MIN_LR * (MAX_LR / MIN_LR) ** (i / (SWEEP_STEPS - 1))
            set_lr(trainer.optimizer, rate)
            loss = trainer.step().loss.item()
            on_progress(i + 1)
            if not math.isfinite(loss):
                break
            rates.append(rate)
            losses.append(loss)
            if has_diverged(smooth_losses(losses)):
                break
    return rates, losses


def _run_trial(subject: Subject, rate: float, on_progress: Any) -> tuple[float, float]:
    """The loss of the first step and the mean of the last quarter of a short training, inf where it was lost."""
    losses: list[float] = []
    with subject.with_overrides(optim={"lr": rate}).trainer() as trainer:
        for i in range(TRIAL_STEPS):
            set_lr(trainer.optimizer, rate)
            losses.append(trainer.step().loss.item())
            on_progress(i + 1)
            if not math.isfinite(losses[-1]):
                return losses[0], math.inf
    tail = losses[-TRIAL_STEPS // 4 :]
    return losses[0], sum(tail) / len(tail)


def smooth_losses(losses: list[float]) -> list[float]:
    """A running mean that forgets, without the pull towards 0 of its first values."""
    mean, averages = 0.0, []
    for i, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        averages.append(mean / (1 - SMOOTHING**i))
    return averages


def has_diverged(smoothed_losses: list[float]) -> bool:
    """Whether the loss has risen so far above its lowest that no higher rate can bring it back."""
    lowest = min(smoothed_losses)
    return (
        smoothed_losses[-1]
        > max(DIVERGENCE_FACTOR * smoothed_losses[0], lowest + DIVERGENCE_FACTOR * (smoothed_losses[0] - lowest))
        and len(smoothed_losses) > 10
    )


def loss_noise(rates: list[float], losses: list[float]) -> float:
    """The standard deviation of the loss from batch to batch."""
    flat_losses = [loss for rate, loss in zip(rates, losses, strict=True) if rate < NEGLIGIBLE_LR]
    return statistics.pstdev(flat_losses) if len(flat_losses) > 1 else 0.0


def find_turning_point(rates: list[float], losses: list[float]) -> float | None:
    """The rate at which the smoothed loss is lowest, after which it rises; None where it never falls by more than the
    noise. The highest rate where it never rises."""
    if not losses:
        return None
    smoothed_losses = smooth_losses(losses)
    initial_loss = statistics.fmean(losses[: max(1, sum(rate < NEGLIGIBLE_LR for rate in rates))])
    lowest_index = min(range(len(smoothed_losses)), key=smoothed_losses.__getitem__)
    # The lowest of some hundred smoothed values lies one standard deviation of the raw ones below by chance.
    if initial_loss - smoothed_losses[lowest_index] < max(MIN_FALL * abs(initial_loss), loss_noise(rates, losses)):
        return None
    return rates[lowest_index]


def assess(
    lr: float, turning_lr: float | None, smoothed_losses: list[float], trials: dict[float, tuple[float, float]]
) -> tuple[Verdict, str, str]:
    """(verdict, text, fix) of the recipe's rate."""
    if not smoothed_losses:
        return "fail", "the loss is not finite at the lowest rate", "see `clustertrain diagnose init-loss` and `data`"
    if turning_lr is None and max(smoothed_losses) - min(smoothed_losses) < MIN_FALL * abs(smoothed_losses[0]):
        text = "the loss is the same at all rates"
        return "fail", text, "the optimizer does not reach the model: see `clustertrain diagnose modes` and `overfit`"
    if turning_lr is None:
        text = f"in {len(smoothed_losses)} steps the loss falls at no rate by more than it differs from batch to batch"
        fix = (
            "a larger train.micro_batch shows more; where `clustertrain diagnose overfit` fails too, it is not the rate"
        )
        return "warn", text, fix
    suggestion = SUGGESTION_FACTOR * turning_lr
    fix = f"set optim.lr = {suggestion:.1g}"
    first_loss, last_loss = trials.get(lr, (math.inf, 0.0))
    summary = f"optim.lr = {lr:.3g}, the suggestion is {suggestion:.2g}"
    if lr > HIGH_FACTOR * suggestion:
        return "fail", f"{summary}: it is {lr / suggestion:.0f} times too high", fix
    if last_loss > MAX_RISE * first_loss:
        return (
            "warn",
            f"{summary}; in a short training without warmup the loss rises from {first_loss:.3g} to {last_loss:.3g}",
            fix,
        )
    if lr < LOW_FACTOR * suggestion:
        return "warn", f"{summary}: it is {suggestion / lr:.0f} times lower", f"{fix}, unless it is for fine-tuning"
    return "pass", summary, ""
