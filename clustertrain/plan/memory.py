"""Bytes a rank needs, from the shapes of the model. First version: formulas, no measurement.

Sources: model states after ZeRO (arXiv 1910.02054, section 3); the gathered units of fully sharded training after the
PyTorch FSDP paper (arXiv 2304.11277, section 3.2.1); activations counted the way of Korthikanti et al. (arXiv
2205.05198, section 4), for a SwiGLU block with grouped-query attention and no stored attention scores.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from clustertrain.plan.layout import Layout
from clustertrain.spec.recipe import ModelSpec

GIB = 1024**3
SAFE_FRACTION = 0.8  # of 454 runs none whose estimate lay below 80 % of the memory ran out of it (arXiv 2411.06465)
WEIGHT_BYTES = 4  # fp32 master weights; bf16 training keeps them too
GRAD_BYTES = 4
OPTIMIZER_BYTES = 8  # AdamW: two fp32 moments
STATE_BYTES = WEIGHT_BYTES + GRAD_BYTES + OPTIMIZER_BYTES
# CUDA context 0.5 to 0.9 GiB, process group and NCCL buffers 1 to 2 GiB (stas00/ml-engineering).
CONTEXT_BYTES = GIB
DISTRIBUTED_BYTES = GIB


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


def activation_bytes(model: ModelSpec, seq_len: int, compute_bytes: int) -> int:
    """What the backward pass keeps of one sequence, without the logits.

    A block keeps, per token: the inputs of its two norms (the residual stream, fp32), both norms' outputs, queries,
    keys, values and attention output (4 dim + 2 kv), and gate, up, their activation and product (4 hidden), in the
    compute type; with dropout a mask byte and the masked branch for each of the two residual branches.
    """
    kv = model.kv_heads * (model.dim // model.heads)
    block = 2 * model.dim * 4 + compute_bytes * (4 * model.dim + 2 * kv + 4 * model.hidden) + 4 * model.heads
    if model.dropout:
        block += 2 * model.dim * (1 + compute_bytes)
    ends = model.dim * (4 + 2 * compute_bytes)
    return seq_len * (model.layers * block + ends)


def logits_bytes(model: ModelSpec, seq_len: int, compute_bytes: int) -> int:
    """Logits of one sequence in the compute type, their log-softmax and its gradient in fp32."""
    return seq_len * model.vocab_size * (compute_bytes + 8)


def _gathered_bytes(model: ModelSpec, compute_bytes: int) -> int:
    """Full parameters and gradients that a sharded rank holds at its peak: embeddings and head stay gathered, of the
    blocks the running one and the prefetched one."""
    block = (model.parameters() - _root_parameters(model)) // model.layers
    return (_root_parameters(model) + 2 * block) * compute_bytes + (_root_parameters(model) + block) * compute_bytes


def _root_parameters(model: ModelSpec) -> int:
    return model.vocab_size * model.dim * (1 if model.tie_embeddings else 2) + model.dim


def of_rank(
    model: ModelSpec,
    layout: Layout,
    *,
    seq_len: int,
    micro_batch: int,
    compute: Literal["fp32", "bf16"],
    device: str,
    capacity_gib: float | None,
) -> Memory:
    """The estimate for one rank of ``layout``; ``fits`` means peak <= 80 % of ``capacity_gib``."""
    compute_bytes = 2 if compute == "bf16" else 4
    shards = layout.dp_shard if layout.strategy == "fsdp" else 1
    held = -(-model.parameters() // shards)
    params = held * WEIGHT_BYTES
    grads = held * GRAD_BYTES
    if layout.strategy == "fsdp":
        params += _gathered_bytes(model, compute_bytes)
    elif compute == "bf16":
        params += held * compute_bytes  # autocast keeps its casts of the weights for the length of the forward pass
    if layout.strategy == "ddp":
        grads += held * GRAD_BYTES  # the reducer's buckets, a second copy
    activations = micro_batch * activation_bytes(model, seq_len, compute_bytes)
    logits = micro_batch * logits_bytes(model, seq_len, compute_bytes)
    overhead = (CONTEXT_BYTES + (DISTRIBUTED_BYTES if layout.world_size > 1 else 0)) if device == "cuda" else 0
    optimizer = held * OPTIMIZER_BYTES
    peak = params + grads + optimizer + activations + logits + overhead
    return Memory(
        params_gib=params / GIB,
        grads_gib=grads / GIB,
        optimizer_gib=optimizer / GIB,
        activations_gib=activations / GIB,
        logits_gib=logits / GIB,
        overhead_gib=overhead / GIB,
        peak_gib=peak / GIB,
        capacity_gib=capacity_gib,
        fits=None if capacity_gib is None else peak / GIB <= SAFE_FRACTION * capacity_gib,
    )
