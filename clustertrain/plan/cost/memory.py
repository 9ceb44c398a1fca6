"""Bytes a rank needs, from the shapes of the model: formulas, nothing measured on the cluster.

Sources: model states after ZeRO (arXiv 1910.02054, section 3); the gathered units of fully sharded training after the
PyTorch FSDP paper (arXiv 2304.11277, section 3.2.1). Activations are counted in
:mod:`clustertrain.plan.cost.activations`.
"""

from __future__ import annotations

import msgspec

from clustertrain.plan.cost.activations import Part, Pass, activation_bytes, logits_bytes, parts
from clustertrain.plan.cost.frameworks import CLUSTERTRAIN, Stack
from clustertrain.plan.cost.model_shape import Decoder
from clustertrain.plan.layout import Layout

GIB = 1024**3
# What a search lets a rank need of its memory.
SAFE_FRACTION = 0.8  # of 454 runs none whose estimate lay below 80 % of the memory ran out of it (arXiv 2411.06465)
# Of the built-in trainer: fp32 weights, which bf16 training keeps too, fp32 gradients.
WEIGHT_BYTES, GRAD_BYTES = CLUSTERTRAIN.weight_bytes, CLUSTERTRAIN.grad_bytes
CONTEXT_BYTES = GIB  # CUDA context and libraries: 0.5 to 0.9 GiB (stas00/ml-engineering)


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank, in GiB. Everything but ``capacity_gib`` is None where the model is unknown (a script of the user's);
    ``capacity_gib`` and ``fits`` are None where the GPU is."""

    params_gib: float | None = None
    grads_gib: float | None = None
    optimizer_gib: float | None = None
    activations_gib: float | None = None
    logits_gib: float | None = None
    overhead_gib: float | None = None
    peak_gib: float | None = None
    capacity_gib: float | None = None
    fits: bool | None = None


Kept = dict[tuple[object, ...], tuple[int, int]]  # (activations, logits) that were counted already


def of_rank(
    model: Decoder,
    layout: Layout,
    run: Pass,
    capacity_gib: float | None,
    stack: Stack = CLUSTERTRAIN,
    kept: Kept | None = None,
) -> Memory:
    """The estimate for the rank of ``layout`` that needs most; ``fits`` means peak <= ``capacity_gib``.

    Of a pipeline's ranks the first keeps the most micro-batches and the last has the logits. ``kept`` spares a search
    from counting the same activations for every way to shard the parameters.
    """
    held = parts(model, layout, run.grad_accum, even=stack.even_stages)
    found = [_of_part(model, layout, run, part, capacity_gib, stack, kept) for part in held]
    return max(found, key=lambda memory: memory.peak_gib or 0.0)


def _of_part(
    model: Decoder,
    layout: Layout,
    run: Pass,
    part: Part,
    capacity_gib: float | None,
    stack: Stack,
    kept: Kept | None,
) -> Memory:
    params, grads, optimizer = _states(model, layout, run, part, stack)
    key = (layout.tp, layout.cp, layout.pp, layout.schedule, layout.virtual_stages, layout.activation_checkpointing,
           run.micro_batch, run.grad_accum, run.autocast, part.head)  # fmt: skip
    counted = kept.get(key) if kept is not None else None
    if counted is None:
        # GPipe does all forward passes first and so has the logits of all micro-batches.
        waiting = part.in_flight if layout.schedule == "gpipe" else 1.0
        logits = round(logits_bytes(model, run, layout, stack) * waiting) if part.head else 0
        counted = activation_bytes(model, run, layout, part, stack), logits
        if kept is not None:
            kept[key] = counted
    activations, logits = counted
    # That of activations is free again by the time of the update.
    allocated = params + grads + optimizer + max(activations + logits, _update_bytes(optimizer, layout, stack))
    overhead = overhead_bytes(allocated, layout, run, stack)
    peak = allocated + overhead
    return Memory(
        params_gib=params / GIB,
        grads_gib=grads / GIB,
        optimizer_gib=optimizer / GIB,
        activations_gib=activations / GIB,
        logits_gib=logits / GIB,
        overhead_gib=overhead / GIB,
        peak_gib=peak / GIB,
        capacity_gib=capacity_gib,
        fits=None if capacity_gib is None else peak / GIB <= capacity_gib,
    )


def _update_bytes(optimizer: float, layout: Layout, stack: Stack) -> float:
    if not stack.optimizer_bytes or (stack.gathers and not _in_parts(layout)):
        return 0.0
    return optimizer / stack.optimizer_bytes * stack.update_bytes


def _in_parts(layout: Layout) -> bool:
    """Whether ranks have shards of parameters."""
    return layout.tp > 1 or (layout.sharded and layout.dp_shard * layout.cp > 1)


def overhead_bytes(allocated: float, layout: Layout, run: Pass, stack: Stack = CLUSTERTRAIN) -> float:
    """What a GPU holds besides tensors: the context, buffers of collectives, and what the allocator reserves more than
    it gives out."""
    if run.device != "cuda":
        return 0.0
    buffers = stack.buffers_gib * GIB if layout.world_size > 1 else 0.0
    return CONTEXT_BYTES + buffers + stack.fragmentation * allocated


def _states(model: Decoder, layout: Layout, run: Pass, part: Part, stack: Stack) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state on the device."""
    block, ends = _block_parameters(model, layout.tp), _end_parameters(model, layout, part)
    own = part.blocks * block + ends
    # Ranks that share a sequence share its parameters too.
    held = -(-own // (layout.dp_shard * layout.cp if layout.sharded else 1))
    on_device = 0 if layout.offload else held
    params, grads, optimizer = (
        on_device * n for n in (stack.weight_bytes, stack.grad_bytes, stack.optimizer_bytes)
    )  # fmt: skip
    if stack.gathers and _in_parts(layout):
        optimizer = max(optimizer, stack.largest_state)
    if layout.offload and not stack.offloads_weights:
        params = held * stack.weight_bytes
    if layout.sharded or (layout.fully_sharded and stack.wraps_parts):
        more_params, more_grads = _gathered_bytes(part.blocks, block, ends, layout, run, stack)
        return params + more_params, grads + more_grads, optimizer
    if layout.zero1:
        largest = max(model.vocab_size * model.dim, model.dim * model.hidden) if stack.deals_whole else 0
        group = stack.zero_group or layout.gradient_ranks
        optimizer = max(-(-held // group), largest) * stack.optimizer_bytes
        if stack.shards_gradients:
            grads = -(-held // group) * stack.grad_bytes
    if run.autocast:
        # The casts of the weights live as long as the graph of their micro-batch, or are redone block by block.
        cast = own if layout.activation_checkpointing == "none" else block + ends
        return params + cast * run.compute_bytes * part.in_flight, grads, optimizer
    return params, grads, optimizer


def _block_parameters(model: Decoder, tp: int) -> int:
    """Of one block on one rank: tensor parallel divides the matrices and repeats the norms."""
    norms = 2 * model.dim
    return (model.block_parameters() - norms) // tp + norms


def _end_parameters(model: Decoder, layout: Layout, part: Part) -> int:
    """What is in no block: embeddings, head, last norm. Tied embeddings are one matrix where they are in one stage."""
    tables = part.embedding + part.head - (model.tie_embeddings and layout.pp == 1)
    return tables * model.vocab_size * model.dim // layout.tp + (model.dim if part.head else 0)


def _gathered_bytes(blocks: int, block: int, ends: int, layout: Layout, run: Pass, stack: Stack) -> tuple[float, float]:
    """Whole parameters and whole gradients that a sharded rank holds at its peak.

    Embeddings and head are whole for the length of a pass; of the blocks the running and the prefetched one, or all
    where they stay gathered until the backward pass. Gradients are reduced from an fp32 copy, and without reduction
    between micro-batches they are kept whole, in fp32, for all parameters.
    """
    gathered = min(blocks, 2) if layout.reshard_after_forward else blocks
    params = (ends + gathered * block) * run.compute_bytes
    reduced = max(ends, block) * stack.reduce_bytes
    if run.grad_accum > 1 and stack.defer_reduction and (layout.defer_reduction or layout.pp > 1):
        return params, (ends + blocks * block) * stack.grad_bytes + reduced
    return params, (ends + block) * run.compute_bytes + reduced
