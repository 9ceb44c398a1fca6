"""Memory of a rank, computed from the shapes of the model; nothing is measured on the cluster.

The built-in trainer is counted moment by moment (:mod:`clustertrain.plan.cost.trainer_memory`). For other frameworks,
model states are counted after ZeRO (arXiv 1910.02054, section 3), the gathered units of fully sharded training after
the PyTorch FSDP paper (arXiv 2304.11277, section 3.2.1), and activations in
:mod:`clustertrain.plan.cost.activations`.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from clustertrain.plan.cost import trainer_memory
from clustertrain.plan.cost.activations import PassConfig, RankStage, activation_bytes, logits_bytes, peak_memory_stages
from clustertrain.plan.cost.frameworks import CLUSTERTRAIN, Framework
from clustertrain.plan.cost.model_shape import DecoderShape, block_matrices
from clustertrain.plan.cost.trainer_memory import LowerBounds, Moment, PassCache
from clustertrain.plan.layout import Layout, recomputed_share

GIB = 1024**3
# Fraction of the memory that a search lets a rank use: of 454 runs, none with an estimate below 80 % of the memory ran
# out of it (arXiv 2411.06465).
SAFE_FRACTION = 0.8
# The built-in trainer keeps fp32 weights (also in bf16 training) and fp32 gradients.
WEIGHT_BYTES, GRAD_BYTES = CLUSTERTRAIN.weight_bytes, CLUSTERTRAIN.grad_bytes
CONTEXT_BYTES = GIB  # CUDA context and libraries: 0.5 to 0.9 GiB (stas00/ml-engineering)


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the rank that needs most, in GiB, at the moment of its peak. Null: not estimated, as for a script or a
    model whose shapes are unknown."""

    params_gib: float | None = None
    """Parameters, with copies in a lower precision and what sharded layers gather, GiB."""
    grads_gib: float | None = None
    """Gradients, with the buffers in which they are reduced, GiB."""
    optimizer_gib: float | None = None
    """State of the optimizer, with temporary tensors of the update, GiB."""
    activations_gib: float | None = None
    """Activations, with temporary tensors of the passes, GiB."""
    logits_gib: float | None = None
    """Logits and what the loss keeps of them, GiB; null for a model entry, where `activations_gib` has them."""
    overhead_gib: float | None = None
    """CUDA context, buffers of collectives and fragmentation of the allocator, GiB; 0 on the CPU."""
    peak_gib: float | None = None
    """Sum of the parts, GiB."""
    capacity_gib: float | None = None
    """Memory of the device, GiB; null if it is unknown."""
    fits: bool | None = None
    """`peak_gib` is at most `capacity_gib`; null if one of them is unknown."""


def estimate_memory(
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    capacity_gib: float | None,
    framework: Framework = CLUSTERTRAIN,
    cache: PassCache | None = None,
) -> MemoryEstimate:
    """Return the estimate for the rank that needs the most memory; ``fits`` means peak <= ``capacity_gib``.

    In a pipeline the first rank keeps the most micro-batches and the last one has the logits.

    Args:
        cache: saves a search from counting the same activations for every way to shard the parameters.
    """
    stages = peak_memory_stages(model, layout, config.grad_accum, framework)
    estimates = [_estimate_stage(model, layout, config, stage, capacity_gib, framework, cache) for stage in stages]
    return max(estimates, key=lambda memory: memory.peak_gib or 0.0)


def _estimate_stage(
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    stage: RankStage,
    capacity_gib: float | None,
    framework: Framework,
    cache: PassCache | None,
) -> MemoryEstimate:
    if framework.is_built_in:
        moment = trainer_memory.find_peak(model, layout, config, stage, framework, cache)
    else:
        moment = _sum_parts(model, layout, config, stage, framework)
    overhead = overhead_bytes(moment.total, layout, config, framework)
    peak = moment.total + overhead
    return MemoryEstimate(
        params_gib=moment.params / GIB,
        grads_gib=moment.grads / GIB,
        optimizer_gib=moment.optimizer / GIB,
        activations_gib=moment.activations / GIB,
        logits_gib=moment.logits / GIB,
        overhead_gib=overhead / GIB,
        peak_gib=peak / GIB,
        capacity_gib=capacity_gib,
        fits=None if capacity_gib is None else peak / GIB <= capacity_gib,
    )


def bound_state(model: DecoderShape, layout: Layout, config: PassConfig, framework: Framework) -> LowerBounds:
    """Return lower bounds of the bytes of parameters, gradients and optimizer state, whatever the micro-batch."""
    stages = peak_memory_stages(model, layout, config.grad_accum, framework)
    if framework.is_built_in:
        return max(trainer_memory.bound_state(model, layout, config, stage, framework) for stage in stages)
    single_pass = replace(config, autocast=False, grad_accum=1)
    states = max(sum(_state_bytes(model, layout, single_pass, stage, framework)) for stage in stages)
    return LowerBounds(states, states)


def bound_pass(model: DecoderShape, layout: Layout, config: PassConfig, framework: Framework) -> LowerBounds:
    """Return lower bounds of the bytes of activations and logits of one rank without a pipeline."""
    if framework.is_built_in:
        return trainer_memory.bound_pass(model, layout, config, framework)
    kept = activation_bytes(model, config, layout, framework=framework) + logits_bytes(model, config, layout, framework)
    return LowerBounds(kept, kept)


def _sum_parts(
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    stage: RankStage,
    framework: Framework,
) -> Moment:
    """Return the sum of all parts, as if gradients and activations were all in memory at once."""
    params, grads, optimizer = _state_bytes(model, layout, config, stage, framework)
    # GPipe does all forward passes first and so has the logits of all micro-batches.
    logit_copies = stage.in_flight if layout.schedule == "gpipe" else 1.0
    logits = round(logits_bytes(model, config, layout, framework) * logit_copies) if stage.head else 0
    activations = activation_bytes(model, config, layout, stage, framework)
    # Activations are freed before the update.
    update = optimizer / framework.optimizer_bytes * framework.update_bytes if framework.optimizer_bytes else 0.0
    if update > activations + logits:
        return Moment(params, grads, optimizer + update)
    return Moment(params, grads, optimizer, activations, logits)


def overhead_bytes(allocated: float, layout: Layout, config: PassConfig, framework: Framework = CLUSTERTRAIN) -> float:
    """Return the bytes on a GPU in addition to tensors: context, collective buffers, fragmentation of the allocator."""
    if config.device != "cuda":
        return 0.0
    buffers = framework.buffers_gib * GIB if layout.world_size > 1 else 0.0
    return CONTEXT_BYTES + buffers + framework.fragmentation * allocated


def _state_bytes(
    model: DecoderShape, layout: Layout, config: PassConfig, stage: RankStage, framework: Framework
) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer state on the device."""
    block_params, end_params = _block_parameters(model, layout.tp), _end_parameters(model, layout, stage)
    stage_params = stage.blocks * block_params + end_params
    # Ranks that share a sequence share its parameters too.
    local_params = -(-stage_params // (layout.dp_shard * layout.cp if layout.is_sharded else 1))
    device_params = 0 if layout.offload else local_params
    params, grads, optimizer = (
        device_params * n for n in (framework.weight_bytes, framework.grad_bytes, framework.optimizer_bytes)
    )  # fmt: skip
    if layout.offload and not framework.offloads_weights:
        params = local_params * framework.weight_bytes
    if layout.is_sharded:
        gathered_params, gathered_grads = _gathered_bytes(
            stage.blocks, block_params, end_params, layout, config, framework
        )
        return params + gathered_params, grads + gathered_grads, optimizer
    if layout.zero1 and not layout.offload:
        group = framework.zero_group or layout.gradient_ranks
        optimizer = -(-local_params // group) * framework.optimizer_bytes
        if framework.shards_gradients:
            grads = -(-local_params // group) * framework.grad_bytes
    if config.autocast:
        # The casts of the weights live as long as the graph of their micro-batch, or are redone block by block.
        share = recomputed_share(layout.activation_checkpointing, model.layers)
        cast_params = (1 - share) * stage_params + share * (block_params + end_params)
        return params + cast_params * config.compute_bytes * stage.in_flight, grads, optimizer
    return params, grads, optimizer


def _block_parameters(model: DecoderShape, tp: int) -> int:
    """Return the parameters of one block on one rank; tp divides the matrices and replicates the vectors."""
    return block_matrices(model) // tp + model.block_vector_elements()


def _end_parameters(model: DecoderShape, layout: Layout, stage: RankStage) -> int:
    """Return the parameters outside blocks: embeddings, head, last norm. Tied embeddings in one stage count once."""
    tables = stage.embedding + stage.head - (model.tie_embeddings and layout.pp == 1)
    return tables * model.vocab_size * model.dim // layout.tp + (model.dim if stage.head else 0)


def _gathered_bytes(
    blocks: int, block: int, ends: int, layout: Layout, config: PassConfig, framework: Framework
) -> tuple[float, float]:
    """Return the bytes of gathered parameters and of unsharded gradients that a sharded rank holds at its peak.

    Embeddings and head are gathered during the whole pass; of the blocks, the running and the prefetched one, or all if
    they stay gathered until the backward pass. Gradients are reduced from an fp32 copy.
    """
    gathered_blocks = min(blocks, 2) if layout.reshard_after_forward else blocks
    params = (ends + gathered_blocks * block) * config.compute_bytes
    reduce_buffer = max(ends, block) * framework.reduce_bytes
    return params, (ends + block) * config.compute_bytes + reduce_buffer
