"""What the global batch means for the learning rate. Advice only: nothing is scaled unless the user types it.

With k times the batch SGD wants k times the rate (arXiv 1706.02677), Adam and its kin the square root of k times (arXiv
2205.10287, whose whole rule also moves the betas and eps). Either needs a warmup, and neither reaches for ever: the
first was followed from 256 images to 8192, 32 times, and lost accuracy past that.
"""

from __future__ import annotations

from clustertrain.plan.layout import Batch, counted
from clustertrain.spec.recipe import Recipe

LINEAR, SQUARE_ROOT = 1.0, 0.5  # powers of k: SGD, and Adam
MOST_SCALED = 32


def scaled_lr(lr: float, times: float, power: float) -> float:
    """The learning rate for ``times`` the batch that ``lr`` was found for."""
    return float(f"{lr * times**power:.3g}")


def tokens(recipe: Recipe, batch: Batch) -> str:
    """``, 256 x 2048 = 524288 tokens a step``; nothing for data that has none."""
    each = recipe.tokens_per_sample
    return f", {batch.global_batch} x {each} = {batch.tokens_per_step} tokens a step" if each else ""


def of_learning_rate(recipe: Recipe, batch: Batch, data_parallel: int) -> str:
    """The reason that goes with ``optim.lr``, for the built-in trainer's AdamW."""
    lr, found_for, whole = recipe.optim.lr, recipe.optim.lr_batch, batch.global_batch
    if found_for and found_for != whole:
        times = whole / found_for
        return (
            f"lr {lr:g}: found for a batch of {found_for}, and this one is {times:g} times that; nothing is scaled, "
            f"optim.lr = {scaled_lr(lr, times, SQUARE_ROOT):g} would be (AdamW: x sqrt({times:g}), arXiv 2205.10287; "
            f"SGD, linearly, {scaled_lr(lr, times, LINEAR):g}, arXiv 1706.02677)"
        )
    if not recipe.train.global_batch:
        ranks = counted(data_parallel, "data-parallel rank")
        return (
            f"lr {lr:g}: used at a batch of {whole}, which follows from {ranks} and may be another on more; "
            f"train.global_batch = {whole} keeps batch and lr on any number. For twice the batch AdamW wants "
            f"optim.lr = {scaled_lr(lr, 2, SQUARE_ROOT):g} (x sqrt(2), arXiv 2205.10287), SGD "
            f"{scaled_lr(lr, 2, LINEAR):g} (x 2, arXiv 1706.02677)"
        )
    return (
        f"lr {lr:g}: stays as it is on another number of ranks, as the batch does; only micro_batch x grad_accum moves"
    )


def of_large_batch(recipe: Recipe, batch: Batch) -> list[str]:
    """Warns where no rule is known to hold."""
    found_for = recipe.optim.lr_batch
    if not found_for or batch.global_batch <= MOST_SCALED * found_for:
        return []
    return [
        f"the global batch of {batch.global_batch} is {batch.global_batch / found_for:g} times the {found_for} that "
        f"optim.lr was found for: past {MOST_SCALED} times a scaled rate lost accuracy (arXiv 1706.02677); use "
        f"train.global_batch = {MOST_SCALED * found_for} or less, or find lr anew for this batch and name it in "
        "optim.lr_batch"
    ]
