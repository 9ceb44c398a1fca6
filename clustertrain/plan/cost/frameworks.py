"""What a training framework makes of the same layout: bytes a parameter, kernels, overlap. Data, with sources.

``CLUSTERTRAIN`` is the built-in trainer. The others are there because published configurations name them: a table's
row is predicted as what it was run with (:mod:`clustertrain.plan.table.rows`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from clustertrain.config.optim import OptimSpec
from clustertrain.plan.cost.optimizer_state import GATHER_BYTES, WHOLE_PARAM_OPTIMIZERS, OptimizerStateSize


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Of a framework and its time.

    ``weight_bytes`` and ``grad_bytes`` a parameter are what a rank keeps of its share through the step,
    ``optimizer_bytes`` moments and, where the weights are 16 bit, the fp32 master copy. ``reduce_bytes``: of a
    gradient on its way between ranks. ``logit_bytes``: of one logit with its gradient and copies at the peak.

    ``plain_attention``: scores of s x s are written out (before FlashAttention, arXiv 2205.14135). ``traffic``: how
    much memory traffic norms, residuals, activations and casts make, of fused kernels'. ``host_s``: what Python and
    the launches of one block's forward pass take the CPU, below which no GPU gets the block done. ``tp_hidden``: the
    part of tensor-parallel communication that runs under matmuls. ``overlaps``: whether data-parallel communication
    runs under the backward pass.
    """

    name: str
    pattern: str = ""  # regular expression that tells it from a table's source and note
    weight_bytes: int = 4
    grad_bytes: float = 4
    optimizer_bytes: float = 8
    reduce_bytes: int = 4
    logit_bytes: float = 14
    offloads_weights: bool = True  # with offload, besides gradients and optimizer
    update_bytes: int = 0  # a parameter, that the optimizer's step takes for a moment, activations being gone by then
    gathers: bool = False  # update_bytes are for whole parameters of which ranks have shards, if they do
    largest_state: int = 0  # bytes of the parameter with the largest state, where that is on one rank as a whole
    buffers_gib: float = 0.5  # buckets and NCCL's own, with more than one rank
    plain_attention: bool = False
    plain_norms: bool = False  # eager norms keep fp32 copies
    repeats_kv: bool = False  # grouped keys and values are kept as one a head
    fused_mlp: bool = False  # SwiGLU's activation is redone in the backward pass instead of kept
    keeps_fp8: bool = False  # in 8 bit the inputs of linear layers are kept in 8 bit
    whole_logits: bool = False  # its loss takes those of the whole vocabulary, which tensor parallel then gathers
    regathers: bool = False  # sequence parallel keeps the split tensor and gathers it again (arXiv 2205.05198, 4.2.2)
    sequence_parallel: bool = True
    distributed_optimizer: bool = False  # also where its tables say DDP
    even_stages: bool = False  # each stage of a pipeline has as many blocks, besides embedding or head
    zero1_whole_params: bool = False  # ZeRO-1 deals out whole parameters, so no rank gets by with less than the largest
    fully_shards_replicas: bool = False  # replicas of split models go through fully_shard too
    shards_gradients: bool = False  # ZeRO-2: a rank keeps the gradients of its share of the optimizer
    zero_group: int = 0  # ranks that split the optimizer; 0: all that average gradients
    defer_reduction: bool = False  # reduces gradients once a step
    counts_causal: bool = False  # its tables' FLOPs: half of attention's scores
    dropout: float = 0.0  # of its usual recipes
    traffic: float = 1.4  # the median of the eager ones that were measured
    host_s: float = 0.6e-3
    flash: float = 0.49  # the rate of its attention kernel, of its 16-bit matmuls'
    tp_hidden: float = 0.0
    overlaps: bool = True
    fragmentation: float = 0.05  # of the allocator: reserved over allocated


# Its kernels are torchtitan's, eager PyTorch under fully_shard; no published table has it.
CLUSTERTRAIN = Framework(
    name="clustertrain", zero1_whole_params=True, fully_shards_replicas=True, defer_reduction=True, buffers_gib=1.0,
    traffic=2.95,
    flash=0.48,
)  # fmt: skip

# bf16 weights, fp32 gradients, fp32 master weights and moments: 18 bytes (Megatron-LM, docs of its distributed
# optimizer).
_MEGATRON = Framework(name="megatron-core", weight_bytes=2, optimizer_bytes=12, even_stages=True)
_OLD_MEGATRON = replace(
    _MEGATRON, plain_attention=True, sequence_parallel=False, regathers=True, host_s=1.0e-3, overlaps=False, dropout=0.1
)

# The first whose words occur wins. Bytes: the frameworks' documentation; traffic, host_s and tp_hidden are set with the
# constants of plan/cost/compute.py.
FRAMEWORKS: tuple[Framework, ...] = (
    # AdamW without fused kernels makes two lists of temporaries.
    Framework(name="transformers", pattern=r"QwenLM", update_bytes=8, traffic=1.5, host_s=4.0e-3),
    replace(
        _MEGATRON, name="megatron-bridge", pattern=r"Megatron-Bridge|Megatron-LM (examples|README)",
        distributed_optimizer=True, grad_bytes=2, reduce_bytes=2, regathers=True, fused_mlp=True, keeps_fp8=True,
        logit_bytes=8, counts_causal=True, traffic=0.6, flash=0.87, host_s=0.0, tp_hidden=0.72,
    ),
    # 16-bit weights and gradients; fp32 master weights, moments and, of its share, gradients (arXiv 1910.02054;
    # runtime/zero/stage_1_and_2.py). Its buckets are 5e8 elements by default.
    Framework(
        name="deepspeed", pattern=r"DeepSpeed ZeRO|DeepSpeed \(HF\)|microsoft/DeepSpeed", weight_bytes=2, grad_bytes=2,
        optimizer_bytes=16, reduce_bytes=2, buffers_gib=2.0, offloads_weights=False, host_s=1.5e-3,
    ),
    replace(
        _OLD_MEGATRON, name="megatron-lm", pattern=r"SC21|2205\.05198|Korthikanti|MT-NLG|alpa|OPT paper", traffic=0.8
    ),
    # DeepSpeed's ZeRO-1 under Megatron's model.
    replace(
        _OLD_MEGATRON, name="megatron-deepspeed", pattern=r"bigscience", grad_bytes=2, reduce_bytes=2,
        optimizer_bytes=16, buffers_gib=3.5, traffic=3.4,
    ),
    replace(_OLD_MEGATRON, name="vtrain", pattern=r"vTrain", traffic=0.45, host_s=0.71e-3, overlaps=True),
    replace(_MEGATRON, name="megatron-llama", pattern=r"Megatron-LLaMA", regathers=True, sequence_parallel=False),
    # Its step makes fp32 gradients, and torch's AdamW two lists of temporaries (internlm/solver/optimizer).
    replace(_MEGATRON, name="internevo", pattern=r"InternEvo", grad_bytes=2, reduce_bytes=2, update_bytes=12),
    replace(_MEGATRON, name="nanotron", pattern=r"nanotron", traffic=1.34, flash=0.6),
    # Its default loss works in place on 16-bit logits (flash-attn's fused cross-entropy).
    Framework(name="composer", pattern=r"llm-foundry", reduce_bytes=2, logit_bytes=4, traffic=0.92, flash=0.43),
    Framework(name="torchtitan", pattern=r"torchtitan|float8 and FSDP2", repeats_kv=True, traffic=2.95, flash=0.48),
    Framework(
        name="litgpt", pattern=r"litgpt", weight_bytes=2, grad_bytes=2, optimizer_bytes=4, reduce_bytes=2,
        plain_norms=True,
    ),
)  # fmt: skip


def find_framework(text: str) -> Framework:
    """The framework that ``text`` names, else the built-in trainer's."""
    return next((framework for framework in FRAMEWORKS if re.search(framework.pattern, text)), CLUSTERTRAIN)


def get_framework(name: str) -> Framework:
    return next(framework for framework in FRAMEWORKS if framework.name == name)


def with_optimizer(framework: Framework, optim: OptimSpec, state: OptimizerStateSize) -> Framework:
    """With the optimizer of a recipe; what is not trained has no gradient."""
    needs_gather = optim.name in WHOLE_PARAM_OPTIMIZERS
    return replace(
        framework,
        optimizer_bytes=state.bytes_per_param,
        grad_bytes=framework.grad_bytes * state.trained_fraction,
        update_bytes=GATHER_BYTES if needs_gather else framework.update_bytes,
        gathers=needs_gather,
        largest_state=state.largest_bytes if needs_gather else 0,
    )


def with_compiled_blocks(framework: Framework) -> Framework:
    """With torch.compile on each block, which fuses the pointwise kernels and makes half of the launches."""
    return replace(
        framework, traffic=framework.traffic / 2, host_s=framework.host_s / 2, fused_mlp=True, plain_norms=False
    )


def with_compiled_model(framework: Framework) -> Framework:
    """With the whole model under torch.compile, and the loss, which then makes one fp32 copy of the logits less."""
    return replace(with_compiled_blocks(framework), logit_bytes=min(framework.logit_bytes, 10))


def with_liger(framework: Framework) -> Framework:
    """With Liger's kernels (arXiv 2410.10989): fused norms and SwiGLU; head and loss in chunks that are as much smaller
    as the vocabulary is wider than the model, section 3.2: about 6 bytes of a 20th to a 30th of the logits."""
    return replace(framework, fused_mlp=True, plain_norms=False, logit_bytes=0.25)
