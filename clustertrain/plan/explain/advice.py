"""What the global batch means for the learning rate. Advice only: nothing is scaled unless the user types it.

With k times the batch SGD wants k times the rate (arXiv 1706.02677), Adam and its kin the square root of k times (arXiv
2205.10287, whose whole rule also moves the betas and eps). Either needs a warmup, and neither reaches for ever: the
first was followed from 256 images to 8192, 32 times, and lost accuracy past that.
"""

from __future__ import annotations

from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.plan.layout import Batch, Layout, counted

LINEAR, SQUARE_ROOT = 1.0, 0.5  # powers of k: SGD, and Adam
MOST_SCALED = 32
_LINEAR_RULE = frozenset({"sgd", "lars"})


def scaled_lr(lr: float, times: float, power: float) -> float:
    """The learning rate for ``times`` the batch that ``lr`` was found for."""
    return float(f"{lr * times**power:.3g}")


def tokens(recipe: Recipe, batch: Batch) -> str:
    """``, 256 x 2048 = 524288 tokens a step``; nothing for data that has none."""
    each = recipe.tokens_per_sample
    return f", {batch.global_batch} x {each} = {batch.tokens_per_step} tokens a step" if each else ""


def of_learning_rate(recipe: Recipe, batch: Batch, data_parallel: int) -> tuple[list[str], list[str]]:
    """Reasons and warnings that go with ``optim.lr`` at this batch, for the optimizer of the recipe."""
    lr, found_for, whole = recipe.optim.lr, recipe.optim.lr_batch, batch.global_batch
    name = recipe.optim.name
    power = LINEAR if name in _LINEAR_RULE else SQUARE_ROOT
    rule = "x {}, arXiv 1706.02677" if power == LINEAR else "x sqrt({}), arXiv 2205.10287"
    if found_for and whole > MOST_SCALED * found_for:
        return [], [_too_large(found_for, whole)]
    if found_for and found_for != whole:
        times = f"{whole / found_for:.3g}"
        other = scaled_lr(lr, whole / found_for, power)
        return [
            f"lr {lr:g}: found for a batch of {found_for}, and this one is {times} times that. Nothing is scaled: say "
            f"optim.lr = {other:g} and optim.lr_batch = {whole} to follow it, with a warmup ({name}: "
            f"{rule.format(times)})"
        ], []
    if not recipe.train.global_batch:
        twice = f"{scaled_lr(lr, 2, power):g} ({rule.format(2)})"
        return [
            f"lr {lr:g}: used at a batch of {whole}, which follows from {counted(data_parallel, 'data-parallel rank')} "
            f"and may be another on more; train.global_batch = {whole} keeps batch and lr on any number. For twice the "
            f"batch {name} wants optim.lr = {twice}"
        ], []
    return [
        f"lr {lr:g}: stays as it is on another number of ranks, as the batch does; then only micro_batch x grad_accum "
        "changes"
    ], []


def _too_large(found_for: int, whole: int) -> str:
    """No rule is known to hold there."""
    return (
        f"the global batch of {whole} is {whole / found_for:.3g} times the {found_for} that optim.lr was found for, "
        f"and past {MOST_SCALED} times a scaled rate lost accuracy (arXiv 1706.02677): use train.global_batch = "
        f"{MOST_SCALED * found_for} or less, or find lr anew for this batch and say so with optim.lr_batch = {whole}"
    )


def of_memory(layout: Layout, batch: Batch, parallel: ParallelSpec) -> list[str]:
    """What makes a rank need less memory, the least invasive first: what changes no number and little time, then what
    computes or sends more, then what moves data over the bus to the host."""
    found = []
    if batch.micro_batch > 1:
        half = next(d for d in range(batch.micro_batch // 2, 0, -1) if batch.micro_batch % d == 0)
        times = batch.micro_batch // half
        found.append(
            f"train.micro_batch = {half}: {counted(batch.grad_accum * times, 'micro-batch')} a step in place of "
            f"{batch.grad_accum}, and the same numbers"
        )
    stronger = {"none": ("selective", "full"), "selective": ("full",)}.get(layout.activation_checkpointing, ())
    if stronger:
        found.append(
            f"parallel.activation_checkpointing = '{stronger[0]}'{' or full' * (len(stronger) > 1)}: activations are "
            "computed again in the backward pass"
        )
    if layout.gradient_ranks > 1 and not layout.fully_sharded:
        names = ("fsdp-grad-op", "fsdp") if layout.zero1 or layout.model_parallel else ("zero1", "fsdp-grad-op", "fsdp")
        found.append(f"--layout {', then '.join(names)}: the ranks share optimizer state, gradients, parameters")
    elif layout.fully_sharded and not layout.reshard_after_forward:
        found.append("--layout fsdp: a layer's parameters are freed after its forward pass")
    if not layout.offload and layout.fully_sharded:
        found.append("parallel.offload = true: parameters, gradients and optimizer state live in host memory")
    if not parallel.activation_offload and layout.activation_checkpointing == "none":
        found.append("parallel.activation_offload = true: activations wait in host memory for the backward pass")
    found.append("more GPUs, with fsdp or tp: each holds less")
    return found
