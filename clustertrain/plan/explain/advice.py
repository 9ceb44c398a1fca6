"""Advice on the learning rate for a global batch, and on saving memory. Nothing is scaled automatically.

For k times the batch, SGD needs k times the rate (arXiv 1706.02677), Adam-type optimizers sqrt(k) times (arXiv
2205.10287, whose full rule also changes the betas and eps). Both need a warmup, and both have limits: the first held
from 256 to 8192 images, a factor of 32, and lost accuracy beyond.
"""

from __future__ import annotations

from clustertrain.config.optimizers import OPTIMIZERS
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.plan.layout import Batch, Layout, pluralize

LINEAR_POWER, SQRT_POWER = 1.0, 0.5  # powers of k for SGD and Adam
MAX_BATCH_SCALING = 32


def scale_lr(lr: float, batch_ratio: float, power: float) -> float:
    """Return the learning rate for ``batch_ratio`` times the batch for which ``lr`` was tuned."""
    return float(f"{lr * batch_ratio**power:.3g}")


def format_tokens(recipe: Recipe, batch: Batch) -> str:
    """Return ``, 256 x 2,048 = 524,288 tokens per step``; an empty string for data without tokens."""
    tokens_per_sample = recipe.tokens_per_sample
    return (
        f", {batch.global_batch:,} x {tokens_per_sample:,} = {batch.tokens_per_step:,} tokens per step"
        if tokens_per_sample
        else ""
    )


def advise_learning_rate(recipe: Recipe, batch: Batch, data_parallel: int) -> tuple[list[str], list[str]]:
    """Return reasons and warnings about ``optim.lr`` at this batch for the recipe's optimizer."""
    lr, tuned_batch, global_batch = recipe.optim.lr, recipe.optim.lr_reference_batch, batch.global_batch
    name = recipe.optim.name
    power = LINEAR_POWER if OPTIMIZERS[name].scales_lr_linearly else SQRT_POWER
    rule = "x {}, arXiv 1706.02677" if power == LINEAR_POWER else "x sqrt({}), arXiv 2205.10287"
    if tuned_batch and global_batch > MAX_BATCH_SCALING * tuned_batch:
        return [], [_format_batch_too_large(tuned_batch, global_batch)]
    if tuned_batch and tuned_batch != global_batch:
        ratio = f"{global_batch / tuned_batch:.3g}"
        scaled = scale_lr(lr, global_batch / tuned_batch, power)
        return [
            f"lr {lr:g}: tuned for a batch of {tuned_batch}, but this one is {ratio} times that. Nothing is scaled: set"
            f" optim.lr = {scaled:g} and optim.lr_reference_batch = {global_batch} to scale it, with a warmup ({name}:"
            f" {rule.format(ratio)})"
        ], []
    if not recipe.train.global_batch:
        doubled = f"{scale_lr(lr, 2, power):g} ({rule.format(2)})"
        return [
            f"lr {lr:g}: used at a batch of {global_batch}, which follows from"
            f" {pluralize(data_parallel, 'data-parallel rank')} and may change with more; train.global_batch ="
            f" {global_batch} keeps batch and lr for any number. For twice the batch, {name} needs optim.lr = {doubled}"
        ], []
    return [
        f"lr {lr:g}: independent of the number of ranks, like the global batch; only micro_batch x grad_accum changes"
    ], []


def _format_batch_too_large(tuned_batch: int, global_batch: int) -> str:
    # No scaling rule is known to hold there.
    return (
        f"the global batch of {global_batch} is {global_batch / tuned_batch:.3g} times the {tuned_batch} for which"
        f" optim.lr was tuned, and beyond {MAX_BATCH_SCALING} times a scaled rate lost accuracy (arXiv 1706.02677): use"
        f" train.global_batch = {MAX_BATCH_SCALING * tuned_batch} or less, or tune lr for this batch and"
        f" set optim.lr_reference_batch = {global_batch}"
    )


def advise_memory(layout: Layout, batch: Batch, parallel: ParallelSpec) -> list[str]:
    """Return changes that reduce the memory of a rank, least invasive first.

    First those that change no result and little time, then those that compute or send more, then offloading.
    """
    suggestions = []
    if batch.micro_batch > 1:
        smaller = next(d for d in range(batch.micro_batch // 2, 0, -1) if batch.micro_batch % d == 0)
        factor = batch.micro_batch // smaller
        suggestions.append(
            f"train.micro_batch = {smaller}: {pluralize(batch.grad_accum * factor, 'micro-batch')} per step instead of "
            f"{batch.grad_accum}, with the same results"
        )
    stronger = {"none": ("selective", "full"), "selective": ("full",)}.get(layout.activation_checkpointing, ())
    if stronger:
        suggestions.append(
            f"parallel.activation_checkpointing = '{stronger[0]}'{' or full' * (len(stronger) > 1)}: activations are "
            "recomputed in the backward pass"
        )
    if layout.gradient_ranks > 1 and not layout.is_fully_sharded:
        strategies = (
            ("fsdp-grad-op", "fsdp") if layout.zero1 or layout.is_model_parallel else ("zero1", "fsdp-grad-op", "fsdp")
        )
        suggestions.append(
            f"--layout {', then '.join(strategies)}: the ranks share optimizer state, gradients, parameters"
        )
    elif layout.is_fully_sharded and not layout.reshard_after_forward:
        suggestions.append("--layout fsdp: a layer's parameters are freed after its forward pass")
    if not layout.offload and layout.is_fully_sharded:
        suggestions.append("parallel.offload = true: parameters, gradients and optimizer state stay in host memory")
    if not parallel.activation_offload and layout.activation_checkpointing == "none":
        suggestions.append(
            "parallel.activation_offload = true: activations stay in host memory until the backward pass"
        )
    suggestions.append("more GPUs with fsdp or tp: each holds less")
    return suggestions
