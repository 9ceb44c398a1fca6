"""Bytes a rank needs, from the shapes of the model. First version: formulas, nothing measured on the cluster.

Sources: model states after ZeRO (arXiv 1910.02054, section 3); the gathered units of fully sharded training after the
PyTorch FSDP paper (arXiv 2304.11277, section 3.2.1); activations counted the way of Korthikanti et al. (arXiv
2205.05198, section 4), for the built-in decoder. On the CPU the count is compared with the tensors that autograd really
keeps, in tests/ranks/test_plan_memory_counted.py; on CUDA it differs by the fused norm and attention, from their code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from clustertrain.plan.layout import Layout
from clustertrain.spec.recipe import ModelSpec

GIB = 1024**3
SAFE_FRACTION = 0.8  # of 454 runs none whose estimate lay below 80 % of the memory ran out of it (arXiv 2411.06465)
WEIGHT_BYTES = 4  # fp32 master weights; bf16 training keeps them too
GRAD_BYTES = 4
OPTIMIZER_BYTES = 8  # AdamW: two fp32 moments
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


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of a rank, and how often it is repeated before the optimizer's step.

    ``autocast``: weights and residual stream stay fp32 and every linear layer casts its input; without it ``bf16``
    casts the parameters themselves (FSDP's mixed precision).
    """

    seq_len: int
    micro_batch: int
    grad_accum: int = 1
    compute: Literal["fp32", "bf16"] = "fp32"
    autocast: bool = False
    device: str = "cpu"

    @property
    def compute_bytes(self) -> int:
        return 2 if self.compute == "bf16" else 4

    @property
    def residual_bytes(self) -> int:
        return 4 if self.autocast else self.compute_bytes


def activation_bytes(model: ModelSpec, run: Pass) -> int:
    """What autograd keeps of one micro-batch between forward and backward, without the logits.

    Per token and block: each of two norms its input (on the CPU, where it is not fused, two fp32 tensors) and its
    output once for all linear layers that share it (under autocast once for each of the five); queries, keys, values
    and attention's output (on the CPU also as a contiguous copy); gate, up, their activation and product; the softmax
    statistics; with dropout the masks of both branches.
    """
    cpu = run.device == "cpu"
    size = run.compute_bytes
    norm = 2 * 4 * model.dim if cpu else run.residual_bytes * model.dim
    kv = model.kv_heads * (model.dim // model.heads)
    linear_inputs = 5 if run.autocast else 2
    attention = (3 if cpu else 2) * model.dim + 2 * kv
    mask = model.dim * (size if cpu else 1) if model.dropout else 0
    statistics = 4 * (model.heads + 2)
    block = 2 * (norm + mask) + size * (linear_inputs * model.dim + attention + 4 * model.hidden) + statistics
    embedding_mask = model.dim * (run.residual_bytes if cpu else 1) if model.dropout else 0
    ends = norm + size * model.dim + embedding_mask
    return run.micro_batch * run.seq_len * (model.layers * block + ends)


def logits_bytes(model: ModelSpec, run: Pass) -> int:
    """At the start of the backward pass: the logits in the compute type, and in fp32 their log-softmax and the
    gradients of the loss before and behind it."""
    return run.micro_batch * run.seq_len * model.vocab_size * (run.compute_bytes + 12)


def _root_parameters(model: ModelSpec) -> int:
    """What is in no block: embeddings, head, last norm."""
    return model.vocab_size * model.dim * (1 if model.tie_embeddings else 2) + model.dim


def _gathered_bytes(model: ModelSpec, run: Pass) -> tuple[int, int]:
    """Whole parameters and whole gradients that a sharded rank holds at its peak: embeddings and head for the length
    of a pass, of the blocks the running and the prefetched one; gradients are reduced from an fp32 copy, and without
    reduction between micro-batches they are kept whole, in fp32, for all parameters."""
    root = _root_parameters(model)
    block = (model.parameters() - root) // model.layers
    params = (root + 2 * block) * run.compute_bytes
    if run.grad_accum > 1:
        return params, model.parameters() * GRAD_BYTES + max(root, block) * GRAD_BYTES
    return params, (root + block) * run.compute_bytes + max(root, block) * GRAD_BYTES


def of_rank(model: ModelSpec, layout: Layout, run: Pass, capacity_gib: float | None) -> Memory:
    """The estimate for one rank of ``layout``; ``fits`` means peak <= 80 % of ``capacity_gib``."""
    held = -(-model.parameters() // (layout.dp_shard if layout.strategy == "fsdp" else 1))
    params, grads = held * WEIGHT_BYTES, held * GRAD_BYTES
    if layout.strategy == "fsdp":
        more_params, more_grads = _gathered_bytes(model, run)
        params, grads = params + more_params, grads + more_grads
    elif run.autocast:
        params += held * run.compute_bytes  # the casts of the weights live as long as the graph
    optimizer = held * OPTIMIZER_BYTES
    activations, logits = activation_bytes(model, run), logits_bytes(model, run)
    overhead = (CONTEXT_BYTES + (DISTRIBUTED_BYTES if layout.world_size > 1 else 0)) if run.device == "cuda" else 0
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
