"""What the global batch means for the learning rate. Advice only: nothing is scaled unless the user types it.

With k times the batch SGD wants k times the rate (arXiv 1706.02677), Adam and its kin the square root of k times (arXiv
2205.10287, whose whole rule also moves the betas and eps). Either needs a warmup, and neither reaches for ever: the
first was followed from 256 images to 8192, 32 times, and lost accuracy past that.
"""

from __future__ import annotations

from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.plan.layout import Batch, Layout, pluralize

LINEAR_POWER, SQRT_POWER = 1.0, 0.5  # powers of k: SGD, and Adam
MAX_BATCH_SCALING = 32
_LINEAR_OPTIMIZERS = frozenset({"sgd", "lars"})


def scale_lr(lr: float, batch_ratio: float, power: float) -> float:
    """The learning rate for ``batch_ratio`` the batch that ``lr`` was found for."""
    return float(f"{lr * batch_ratio**power:.3g}")


def format_tokens(recipe: Recipe, batch: Batch) -> str:
    """``, 256 x 2048 = 524288 tokens a step``; nothing for data that has none."""
    tokens_per_sample = recipe.tokens_per_sample
    return (
        f", {batch.global_batch} x {tokens_per_sample} = {batch.tokens_per_step} tokens a step"
        if tokens_per_sample
        else ""
    )


def advise_learning_rate(recipe: Recipe, batch: Batch, data_parallel: int) -> tuple[list[str], list[str]]:
    """Reasons and warnings that go with ``optim.lr`` at this batch, for the optimizer of the recipe."""
    lr, tuned_batch, global_batch = recipe.optim.lr, recipe.optim.lr_batch, batch.global_batch
    name = recipe.optim.name
    power = LINEAR_POWER if name in _LINEAR_OPTIMIZERS else SQRT_POWER
    rule = "x {}, arXiv 1706.02677" if power == LINEAR_POWER else "x sqrt({}), arXiv 2205.10287"
    if tuned_batch and global_batch > MAX_BATCH_SCALING * tuned_batch:
        return [], [_format_batch_too_large(tuned_batch, global_batch)]
    if tuned_batch and tuned_batch != global_batch:
        ratio = f"{global_batch / tuned_batch:.3g}"
        scaled = scale_lr(lr, global_batch / tuned_batch, power)
        return [
            f"lr {lr:g}: found for a batch of {tuned_batch}, and this one is {ratio} times that. Nothing is scaled: say"
            f" optim.lr = {scaled:g} and optim.lr_batch = {global_batch} to follow it, with a warmup ({name}:"
            f" {rule.format(ratio)})"
        ], []
    if not recipe.train.global_batch:
        doubled = f"{scale_lr(lr, 2, power):g} ({rule.format(2)})"
        return [
            f"lr {lr:g}: used at a batch of {global_batch}, which follows from"
            f" {pluralize(data_parallel, 'data-parallel rank')} and may be another on more; train.global_batch ="
            f" {global_batch} keeps batch and lr on any number. For twice the batch {name} wants optim.lr = {doubled}"
        ], []
    return [
        f"lr {lr:g}: stays as it is on another number of ranks, as the batch does; then only micro_batch x grad_accum "
        "changes"
    ], []


def _format_batch_too_large(tuned_batch: int, global_batch: int) -> str:
    """No rule is known to hold there."""
    return (
        f"the global batch of {global_batch} is {global_batch / tuned_batch:.3g} times the {tuned_batch} that optim.lr"
        f" was found for, and past {MAX_BATCH_SCALING} times a scaled rate lost accuracy (arXiv 1706.02677): use"
        f" train.global_batch = {MAX_BATCH_SCALING * tuned_batch} or less, or find lr anew for this batch and say so"
        f" with optim.lr_batch = {global_batch}"
    )


def advise_memory(layout: Layout, batch: Batch, parallel: ParallelSpec) -> list[str]:
    """What makes a rank need less memory, the least invasive first: what changes no number and little time, then what
    computes or sends more, then what moves data over the bus to the host."""
    suggestions = []
    if batch.micro_batch > 1:
        smaller = next(d for d in range(batch.micro_batch // 2, 0, -1) if batch.micro_batch % d == 0)
        factor = batch.micro_batch // smaller
        suggestions.append(
            f"train.micro_batch = {smaller}: {pluralize(batch.grad_accum * factor, 'micro-batch')} a step in place of "
            f"{batch.grad_accum}, and the same numbers"
        )
    stronger = {"none": ("selective", "full"), "selective": ("full",)}.get(layout.activation_checkpointing, ())
    if stronger:
        suggestions.append(
            f"parallel.activation_checkpointing = '{stronger[0]}'{' or full' * (len(stronger) > 1)}: activations are "
            "computed again in the backward pass"
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
        suggestions.append("parallel.offload = true: parameters, gradients and optimizer state live in host memory")
    if not parallel.activation_offload and layout.activation_checkpointing == "none":
        suggestions.append("parallel.activation_offload = true: activations wait in host memory for the backward pass")
    suggestions.append("more GPUs, with fsdp or tp: each holds less")
    return suggestions
