"""Notes on settings that are far from common practice: learning rate, warmup, precision, checkpoint interval."""

from __future__ import annotations

from clustertrain.config.checkpoint import CheckpointSpec
from clustertrain.config.hardware import GpuType
from clustertrain.config.optimizers import OPTIMIZERS
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import Precision
from clustertrain.plan.layout import format_number, pluralize

MAX_LR_FACTOR = 10  # beyond the usual range
USUAL_WARMUP_SHARE, USUAL_WARMUP_STEPS = 0.01, 1000  # a language model usually has one of them or more
MAX_WARMUP_SHARE = 0.1
MAX_LOST_S = 3600.0  # of computation after a failure


def lr_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if the peak rate is far from the usual ones of the optimizer.

    The lower limit does not hold for fine-tuning, whose rates are lower.
    """
    name, lr = recipe.optim.name, recipe.optim.lr
    low, high = OPTIMIZERS[name].usual_lr
    is_low = lr * MAX_LR_FACTOR < low and not recipe.model.weight_files and not recipe.optim.freeze
    if lr <= high * MAX_LR_FACTOR and not is_low:
        return []
    factor = low / lr if is_low else lr / high
    return [
        f"optim.lr = {lr:g} is {factor:.3g} times {'below' if is_low else 'above'} the usual rates of {name}, {low:g}"
        f" to {high:g}: `clustertrain diagnose lr-range` finds a suitable one"
    ]


def explain_warmup(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return reasons and warnings about the warmup of a model with attention, which usually needs one."""
    schedule, steps = recipe.schedule, recipe.train.steps
    if recipe.model.entry or recipe.model.kind == "convnet" or schedule.kind == "one-cycle":
        return [], []
    warmup = schedule.resolve_warmup_steps(steps)
    subject = f"warmup of {pluralize(warmup, 'step')}, {warmup / steps:.1%} of the run"
    usual = "1 to 10 % of the steps, or 1000 to 2000 steps, are usual for transformers"
    if warmup == 0:
        return [], [f"no warmup: a transformer may diverge in its first steps; {usual} (schedule.warmup_ratio = 0.02)"]
    if warmup < min(USUAL_WARMUP_STEPS, USUAL_WARMUP_SHARE * steps):
        return [f"{subject}: {usual}"], []
    if warmup > max(2 * USUAL_WARMUP_STEPS, MAX_WARMUP_SHARE * steps):
        return [f"{subject}: {usual}; a longer one spends steps at a low rate"], []
    return [], []


def precision_warnings(requested: Precision, gpu: GpuType | None) -> list[str]:
    """Return a warning if fp16 or fp32 was requested on a GPU with bf16."""
    if gpu is None or not gpu.bf16 or requested not in ("fp16", "fp32"):
        return []
    reason = (
        "bf16 has the range of fp32 and needs no loss scale"
        if requested == "fp16"
        else "bf16 and tf32 products are several times faster"
    )
    return [f"train.precision = '{requested}': {gpu.name} supports bf16; {reason}"]


def lost_time_warnings(checkpoint: CheckpointSpec, step_s: float | None, steps: int) -> list[str]:
    """Return a warning if a failure may lose more than an hour of training."""
    if step_s is None or not isinstance(checkpoint.every, int):
        return []
    lost_s = min(checkpoint.every, steps) * step_s
    if lost_s <= MAX_LOST_S:
        return []
    return [
        f"checkpoint.every = {checkpoint.every} steps of {format_number(step_s)} s: a failure loses up to"
        f" {lost_s / 60:.0f} minutes of training; checkpoint.every = 'auto' or '30min' bounds this"
    ]
