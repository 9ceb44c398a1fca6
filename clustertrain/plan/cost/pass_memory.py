"""Bytes of the forward and backward passes of a rank of the built-in trainer."""

from __future__ import annotations

from typing import NamedTuple

from clustertrain.plan.cost import activations
from clustertrain.plan.cost.activations import PassConfig, RankStage
from clustertrain.plan.cost.frameworks import Framework
from clustertrain.plan.cost.model_shape import DecoderShape
from clustertrain.plan.layout import Layout
from clustertrain.plan.pipeline_schedules import LAYERS_PER_BLOCK, SPLIT_BACKWARD_SCHEDULES

FP32 = 4


class PassBytes(NamedTuple):
    """Bytes of a rank's passes, which do not depend on how data parallelism shards the parameters."""

    saved: float
    """Kept for the backward pass, of all micro-batches in flight."""
    block_backward: float
    """Added by a block's backward pass."""
    logits: float
    """Of the loss, at the start of the first backward pass."""
    later_logits: float
    """The same for the second micro-batch of a pipeline."""
    stage_buffers: float
    """In which pipeline stages receive."""


PassCache = dict[tuple[object, ...], PassBytes]


def count_passes(
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    stage: RankStage,
    framework: Framework,
    cache: PassCache | None,
) -> PassBytes:
    key = (layout.tp, layout.cp, layout.pp, layout.schedule, layout.virtual_stages, layout.activation_checkpointing,
           config.micro_batch, config.grad_accum, config.autocast, stage)  # fmt: skip
    cached = cache.get(key) if cache is not None else None
    if cached is not None:
        return cached
    tokens = config.micro_batch * config.seq_len / layout.cp
    stream = config.residual_bytes * model.dim / (layout.tp if layout.sequence_parallel else 1)
    kept = activations.saved_bytes(model, config, layout, stage, framework)
    # The feed-forward layer: three gradients of its width without the product, which is freed, and two of the stream.
    block_backward = 2 * config.compute_bytes * model.hidden / layout.tp + stream + config.compute_bytes * model.dim
    is_split, is_recomputed = layout.schedule in SPLIT_BACKWARD_SCHEDULES, layout.activation_checkpointing != "none"
    stage_blocks = -(-stage.blocks // layout.virtual_stages)
    if is_split:
        if is_recomputed:
            block_backward = config.compute_bytes * _recomputed_for_weights(model, layout, stage_blocks)
        block_backward += config.compute_bytes * stage_blocks * (1 + stage.deferred) * _kept_gradients(model, layout)
    elif is_recomputed:
        block_backward += activations.block_bytes(model, config, layout, framework)
    # A stage keeps one buffer per micro-batch for activations, and one for gradients, from step to step.
    buffers = (2 * layout.virtual_stages - stage.embedding - stage.head) * config.grad_accum if layout.pp > 1 else 0
    logits = tokens * model.vocab_size * stage.head
    result = PassBytes(
        saved=tokens * kept * stage.in_flight,
        block_backward=tokens * block_backward,
        logits=logits * _logit_bytes(layout, config, framework, stage, stage.in_flight),
        later_logits=logits * _logit_bytes(layout, config, framework, stage, stage.in_flight - 1),
        stage_buffers=buffers * tokens * stream,
    )
    if cache is not None:
        cache[key] = result
    return result


def _kept_gradients(model: DecoderShape, layout: Layout) -> float:
    """Return the elements per token of a block's linear layers and norms, whose output gradients a split backward pass
    keeps until it computes the gradients of the weights."""
    norms = 2 * model.dim / (layout.tp if layout.sequence_parallel else 1)
    return (model.attention_dim + 2 * model.kv_dim + 2 * model.hidden) / layout.tp + 2 * model.dim + norms


def _recomputed_for_weights(model: DecoderShape, layout: Layout, blocks: int) -> float:
    """Return the elements per token that the pass for a stage's weights recomputes.

    ``stage_backward_weight`` calls autograd once per layer, and each call recomputes the whole block. The inputs of
    linear layers and norms are freed when the layer's call is over, everything else at the end of the pass. The peak is
    in the call for the up or for the down projection of the last block.
    """
    layers = LAYERS_PER_BLOCK
    product = model.hidden / layout.tp
    rest = (2 * model.attention_dim + 2 * model.kv_dim) / layout.tp + 3 * product
    in_up = rest * (layers * blocks - 1) + (product + model.dim) * (layers - 1)
    return max(in_up, (rest * blocks + product) * layers)


def _logit_bytes(layout: Layout, config: PassConfig, framework: Framework, stage: RankStage, in_flight: float) -> float:
    """Return the bytes per logit at the start of the backward pass: fp32 log-softmax, its gradient and the logits'.

    torch's loss of split logits has one more fp32 tensor. A pipeline keeps the outputs of its stages; gpipe also keeps
    the log-softmax of all micro-batches; a split backward pass also keeps the gradients of outputs until the pass for
    weights.
    """
    is_split = layout.tp > 1 and config.parallel.loss_parallel
    is_gathered = is_split and framework.whole_logits
    shards = layout.tp if is_split and not is_gathered else 1
    output = config.compute_bytes / (layout.tp if is_split else 1) if layout.pp > 1 or is_gathered else 0.0
    loss = (4 if shards > 1 else 3) * FP32 / shards
    others = in_flight - 1 if layout.schedule == "gpipe" else 0.0
    return output * (1 + stage.deferred) + loss + others * (output + FP32 / shards)
