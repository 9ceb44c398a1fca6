"""Parameters of a rank: what is stored, gathered and cast, and which elements have gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clustertrain.plan.cost.activations import PassConfig, RankStage
from clustertrain.plan.cost.adapter_shape import AdapterShape
from clustertrain.plan.cost.model_shape import DecoderShape, block_matrices
from clustertrain.plan.layout import Layout

FP32 = 4


@dataclass(frozen=True, kw_only=True)
class RankParams:
    """Parameters of a rank, before ``fully_shard`` splits them unless stated otherwise."""

    stored: float
    """Bytes of the rank's share."""
    gathered_block: float
    """Bytes of a block as ``fully_shard`` gathers it."""
    gathered_ends: float
    """Bytes of the parameters outside blocks, gathered."""
    block: float
    """Elements of a block that have gradients."""
    block_share: float
    """Those in the rank's share."""
    ends: float
    """Elements outside blocks that have gradients."""
    share: int
    """Elements with gradients in the rank's share."""
    table: int
    """Elements of the gradient of an embedding or an output layer; 0 if they are frozen."""
    table_excess: int
    """Elements by which the gradient of a split embedding exceeds its share of the rows."""
    hidden: float
    """Elements of a block's matrices that have gradients."""
    weight_grad: float
    """Elements of the largest gradient in a block."""
    cast_block: float
    """Bytes of a block's weights that autocast casts and autograd keeps."""
    cached_block: float
    """Those of them that autocast keeps until the end of the forward pass: of trained weights."""
    cast_head: float
    """Bytes of the output layer's weight that autocast casts."""
    unpacked: float = 0.0
    """Bytes of a frozen matrix while it is unpacked for a product."""


def count_params(
    model: DecoderShape, layout: Layout, config: PassConfig, stage: RankStage, adapter: AdapterShape | None
) -> RankParams:
    """Return the parameters of a rank with the part ``stage`` of the model."""
    # Ranks that share a sequence share its parameters too.
    shards = layout.dp_shard * layout.cp if layout.is_sharded else 1
    is_tied = model.tie_embeddings and stage.embedding and stage.head and layout.pp == 1
    tables = stage.embedding + stage.head - is_tied
    if adapter is not None:
        return _count_adapted(model, layout, config, stage, adapter, tables, shards)
    matrices = block_matrices(model) // layout.tp
    block = matrices + model.block_vector_elements()
    table = model.vocab_size * model.dim // layout.tp
    ends = tables * table + (model.dim if stage.head else 0)
    share = -(-(stage.blocks * block + ends) // shards)
    # The gradient of a split embedding covers the whole vocabulary, unless a tied head adds one that is split.
    is_split_table = layout.tp > 1 and stage.embedding and not is_tied
    casts = config.compute_bytes * config.autocast
    return RankParams(
        stored=FP32 * share,
        gathered_block=config.compute_bytes * block,
        gathered_ends=config.compute_bytes * ends,
        block=block,
        block_share=block / shards,
        ends=ends,
        share=share,
        table=table,
        table_excess=model.vocab_size * model.dim - table if is_split_table else 0,
        hidden=matrices,
        weight_grad=model.dim * model.hidden / layout.tp,
        cast_block=casts * matrices,
        cached_block=casts * matrices,
        cast_head=casts * table,
    )


def _count_adapted(
    model: DecoderShape,
    layout: Layout,
    config: PassConfig,
    stage: RankStage,
    adapter: AdapterShape,
    tables: int,
    shards: int,
) -> RankParams:
    tp, compute = layout.tp, config.compute_bytes
    vectors, table = model.block_vector_elements(), model.vocab_size * model.dim // tp
    block, head = adapter.block_elements(model, tp), adapter.head_elements(model, tp) * stage.head
    block_share = adapter.block_elements(model, tp, shards)
    share = stage.blocks * block_share + adapter.head_elements(model, tp, shards) * stage.head
    # The buffers of an all-gather have equal parts for all ranks.
    padded_block, padded_head = shards * block_share, shards * adapter.head_elements(model, tp, shards) * stage.head
    final_norm = model.dim * stage.head
    table_bytes = tables * table * adapter.table_bytes
    casts = compute * config.autocast
    # The norms of DoRA are computed before the gradients of the feed-forward layer exist, which pass_memory counts.
    tokens = config.micro_batch * config.seq_len / layout.cp
    backward = tokens * compute * 2 * (model.hidden / tp + model.dim)
    frozen_casts = 0.0 if adapter.is_stored_apart else adapter.matrix_bytes(model, tp, plain_bytes=casts)
    return RankParams(
        stored=(
            stage.blocks * (adapter.matrix_bytes(model, tp, shards) + FP32 * vectors / shards)
            + (table_bytes + FP32 * final_norm) / shards
            + FP32 * share
        ),
        gathered_block=(adapter.matrix_bytes(model, tp, plain_bytes=compute) + compute * (vectors + padded_block)),
        gathered_ends=tables * table * min(compute, adapter.table_bytes) + compute * (final_norm + padded_head),
        block=padded_block if layout.is_fully_sharded else block,
        block_share=block_share,
        ends=padded_head if layout.is_fully_sharded else head,
        share=round(share),
        table=0,
        table_excess=0,
        hidden=sum(share * math.prod(shape) for share, shape in adapter.block_adapters(model, tp) if len(shape) > 1),
        weight_grad=adapter.rank * max(model.dim, model.hidden, model.attention_dim),
        cast_block=frozen_casts + casts * block,
        cached_block=casts * block,
        cast_head=0.0 if adapter.is_stored_apart else casts * table,
        unpacked=max(adapter.unpack_bytes(model, tp, compute), adapter.norm_bytes(model, tp) - backward),
    )
