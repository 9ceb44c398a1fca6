"""The learning-rate range test (Smith, "Cyclical Learning Rates for Training Neural Networks", arXiv 1506.01186,
section 3.3).

The rate grows exponentially from step to step; it is too high where the loss starts to rise. Short trainings at rates
around the suggestion follow.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from clustertrain.diagnose.child_output import ProgressCallback
from clustertrain.diagnose.registry import Finding, Plot, Verdict
from clustertrain.diagnose.subject import Subject
from clustertrain.train.optim.lr_schedule import set_lr

MIN_LR, MAX_LR = 1e-7, 10.0
SWEEP_STEPS = 120  # 15 per decade
SMOOTHING = 0.8  # decay of the running mean of the loss
DIVERGENCE_FACTOR = 1.5  # the sweep ends once the loss has risen by this factor times its fall
SUGGESTION_FACTOR = 0.1  # of the rate at which the loss starts to rise
TRIAL_FACTORS = (0.1, 10**-0.5, 1.0, 10**0.5, 10.0)  # rates of the short trainings, relative to the suggestion
TRIAL_STEPS = 40
MIN_FALL = 0.02  # of the first loss; a smaller fall does not count
NEGLIGIBLE_LR = 1e-5  # below this rate the loss only changes by noise
MAX_RISE = 1.1  # of the loss in a short training
HIGH_FACTOR, LOW_FACTOR = 10.0, 0.01  # limits of optim.lr relative to the suggestion


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
        marks |= {"suggestion": suggestion, "rises": turning_lr}
        for i, rate in enumerate(sorted({*(suggestion * f for f in TRIAL_FACTORS), subject.recipe.optim.lr})):
            offset = SWEEP_STEPS + i * TRIAL_STEPS
            trials[rate] = _run_trial(
                subject, rate, lambda completed, offset=offset: on_progress(offset + completed, total)
            )
        evidence |= {"turning_lr": turning_lr, "suggestion": suggestion}
        evidence["trials"] = [{"lr": r, "first_loss": a, "last_loss": b} for r, (a, b) in trials.items()]
        rows.append(("rises at", f"{turning_lr:.2g}; the suggestion is a tenth of it, {suggestion:.2g}"))
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
    """Return the rates and their losses, up to the rate at which the loss diverges."""
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
    """Return a short training's first loss and the mean loss of its last quarter, inf if the loss diverged."""
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
    """Return the exponential moving average of ``losses``, with bias correction for its start at 0."""
    mean, averages = 0.0, []
    for i, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        averages.append(mean / (1 - SMOOTHING**i))
    return averages


def has_diverged(smoothed_losses: list[float]) -> bool:
    """Return whether the loss has risen too far above its minimum to recover at a higher rate."""
    lowest = min(smoothed_losses)
    return (
        smoothed_losses[-1]
        > max(DIVERGENCE_FACTOR * smoothed_losses[0], lowest + DIVERGENCE_FACTOR * (smoothed_losses[0] - lowest))
        and len(smoothed_losses) > 10
    )


def loss_noise(rates: list[float], losses: list[float]) -> float:
    """Return the standard deviation of the loss between batches."""
    flat_losses = [loss for rate, loss in zip(rates, losses, strict=True) if rate < NEGLIGIBLE_LR]
    return statistics.pstdev(flat_losses) if len(flat_losses) > 1 else 0.0


def find_turning_point(rates: list[float], losses: list[float]) -> float | None:
    """Return the rate with the lowest smoothed loss, or None if the loss never falls by more than its noise.

    The result is the highest rate if the loss never rises.
    """
    if not losses:
        return None
    smoothed_losses = smooth_losses(losses)
    initial_loss = statistics.fmean(losses[: max(1, sum(rate < NEGLIGIBLE_LR for rate in rates))])
    lowest_index = min(range(len(smoothed_losses)), key=smoothed_losses.__getitem__)
    # By chance, the minimum of about 100 smoothed values is one standard deviation of the raw values below the mean.
    if initial_loss - smoothed_losses[lowest_index] < max(MIN_FALL * abs(initial_loss), loss_noise(rates, losses)):
        return None
    return rates[lowest_index]


def assess(
    lr: float, turning_lr: float | None, smoothed_losses: list[float], trials: dict[float, tuple[float, float]]
) -> tuple[Verdict, str, str]:
    """Return (verdict, text, fix) for the recipe's learning rate."""
    if not smoothed_losses:
        fix = "run `clustertrain diagnose init-loss` and `clustertrain diagnose data`"
        return "fail", "the loss is NaN or Inf at the lowest rate", fix
    if turning_lr is None and max(smoothed_losses) - min(smoothed_losses) < MIN_FALL * abs(smoothed_losses[0]):
        text = "the loss is the same at all rates"
        fix = "run `clustertrain diagnose modes` and `overfit`: the optimizer does not change the model"
        return "fail", text, fix
    if turning_lr is None:
        text = f"in {len(smoothed_losses)} steps the loss falls at no rate by more than its noise between batches"
        fix = "use a larger train.micro_batch; if `clustertrain diagnose overfit` fails too, the rate is not the cause"
        return "warn", text, fix
    suggestion = SUGGESTION_FACTOR * turning_lr
    fix = f"set optim.lr = {suggestion:.1g}"
    first_loss, last_loss = trials.get(lr, (math.inf, 0.0))
    summary = f"optim.lr = {lr:.3g}; suggestion: {suggestion:.2g}"
    if lr > HIGH_FACTOR * suggestion:
        return "fail", f"{summary}; optim.lr is {lr / suggestion:.0f} times too high", fix
    if last_loss > MAX_RISE * first_loss:
        return (
            "warn",
            f"{summary}; in a short training without warmup the loss rises from {first_loss:.3g} to {last_loss:.3g}",
            fix,
        )
    if lr < LOW_FACTOR * suggestion:
        return "warn", f"{summary}; optim.lr is {suggestion / lr:.0f} times lower", f"{fix}, except for fine-tuning"
    return "pass", summary, ""
