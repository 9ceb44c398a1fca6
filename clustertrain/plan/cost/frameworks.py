"""Properties of training frameworks: bytes per parameter, kernels, overlap. Data, with sources.

``CLUSTERTRAIN`` is the built-in trainer. The others serve to predict published configurations, each as the framework
with which it was run (:mod:`clustertrain.plan.table.rows`).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Literal

from clustertrain.config.optim import OptimSpec
from clustertrain.plan.cost.adapter_shape import AdapterShape
from clustertrain.plan.cost.optimizer_state import OptimizerStateSize

_DEFAULT_OPTIM = OptimSpec()
_VERSION = re.compile(r"-(core-)?v?\d[\w.+-]*$")  # of a framework, after its name


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Memory and time properties of a framework."""

    name: str
    aliases: tuple[str, ...] = ()  # further names in a table's column framework
    pattern: str = ""  # matches the source and note of a table's row
    sharding: Literal["ddp", "zero1", "fsdp"] = "fsdp"  # usual data parallelism, if a row does not state it
    weight_bytes: int = 4  # per parameter of a rank's share, throughout the step
    grad_bytes: float = 4  # per parameter of a rank's share, throughout the step
    optimizer_bytes: float = 8  # per parameter: moments and, with 16-bit weights, the fp32 master copy
    reduce_bytes: int = 4  # per gradient element sent between ranks
    logit_bytes: float = 14  # per logit, with its gradient and copies, at the peak
    has_recipe: bool = True  # False: a library whose users choose types and loss
    offloads_often: bool = False  # its users resort to offload
    offloads_weights: bool = True  # offload includes weights, in addition to gradients and optimizer
    update_bytes: int = 0  # temporary, per parameter, in the optimizer step, when activations are freed
    buffers_gib: float = 0.5  # buckets and NCCL's buffers, with more than one rank
    plain_attention: bool = False  # writes the s x s scores to memory (before FlashAttention, arXiv 2205.14135)
    plain_norms: bool = False  # eager norms keep fp32 copies
    repeats_kv: bool = False  # keeps grouped keys and values expanded to one per head
    fused_mlp: bool = False  # recomputes SwiGLU's activation in the backward pass
    keeps_fp8: bool = False  # in 8 bit, keeps the inputs of linear layers in 8 bit
    whole_logits: bool = False  # the loss needs the whole vocabulary, which tp gathers
    regathers: bool = False  # sp keeps the split tensor and gathers it again (arXiv 2205.05198, 4.2.2)
    sequence_parallel: bool = True
    distributed_optimizer: bool = False  # even if its tables state DDP
    ddp_may_shard: bool = False  # its DDP works with and without distributed optimizer
    even_stages: bool = False  # all pipeline stages have equally many blocks, regardless of embedding and head
    zero1_whole_params: bool = False  # ZeRO-1 assigns whole parameters, so a rank holds at least the largest
    fully_shards_replicas: bool = False  # uses fully_shard also for replicas of split models
    shards_gradients: bool = False  # ZeRO-2: keeps the gradients of its share of the optimizer
    zero_group: int = 0  # ranks that share the optimizer state; 0: all that average gradients
    defer_reduction: bool = False  # reduces gradients once per step
    counts_causal: bool = False  # FLOPs in its tables include half of the attention scores
    dropout: float = 0.0  # in its usual recipes
    traffic: float = 1.4  # pointwise memory traffic relative to fused kernels; the median of measured eager frameworks
    host_s: float = 0.6e-3  # CPU time for Python and launches per block and forward pass, a lower bound of its time
    flash: float = 0.49  # rate of its attention kernel relative to its 16-bit matmuls
    tp_hidden: float = 0.0  # fraction of tensor-parallel communication hidden by matmuls
    overlaps: bool = True  # data-parallel communication overlaps the backward pass
    fragmentation: float = 0.05  # of the allocator: reserved over allocated memory, minus 1
    optim: OptimSpec = _DEFAULT_OPTIM  # of the built-in trainer
    adapter: AdapterShape | None = None  # of the built-in trainer: the rest of the model is frozen

    @property
    def is_built_in(self) -> bool:
        """Whether this is the built-in trainer, whose memory is known tensor by tensor."""
        return self.name == "clustertrain"


# Its kernels are torchtitan's, eager PyTorch under fully_shard; no published table has it.
CLUSTERTRAIN = Framework(
    name="clustertrain", aliases=("ours",), zero1_whole_params=True, fully_shards_replicas=True, defer_reduction=True,
    buffers_gib=1.0,
    traffic=2.95,
    flash=0.48,
)  # fmt: skip

# bf16 weights, fp32 gradients, fp32 master weights and moments: 18 bytes (Megatron-LM, docs of its distributed
# optimizer).
_MEGATRON = Framework(
    name="megatron-core", weight_bytes=2, optimizer_bytes=12, even_stages=True, sharding="zero1",
    regathers=True, fused_mlp=True, logit_bytes=8,
)  # fmt: skip
_OLD_MEGATRON = replace(
    _MEGATRON, plain_attention=True, sequence_parallel=False, host_s=1.0e-3, overlaps=False, dropout=0.1,
    sharding="ddp", fused_mlp=False, logit_bytes=14,
)  # fmt: skip
# Transformer Engine's kernels.
_BRIDGE = replace(
    _MEGATRON, distributed_optimizer=True, grad_bytes=2, reduce_bytes=2, keeps_fp8=True, traffic=0.6, flash=0.87,
    host_s=0.0, tp_hidden=0.72,
)  # fmt: skip
# 16-bit weights and gradients; fp32 master weights, moments and gradients of a rank's share (arXiv 1910.02054;
# runtime/zero/stage_1_and_2.py). Its buckets are 5e8 elements by default.
_DEEPSPEED = Framework(
    name="deepspeed", aliases=("zero",), weight_bytes=2, grad_bytes=2, optimizer_bytes=16, reduce_bytes=2,
    buffers_gib=2.0, offloads_weights=False, offloads_often=True, host_s=1.5e-3,
)  # fmt: skip
# DeepSpeed's ZeRO-1 under Megatron's model.
_MEGATRON_DEEPSPEED = replace(
    _OLD_MEGATRON, name="megatron-deepspeed", grad_bytes=2, reduce_bytes=2, optimizer_bytes=16, buffers_gib=3.5,
    traffic=3.4, sharding="zero1",
)  # fmt: skip
_TORCHTITAN = Framework(name="torchtitan", aliases=("titan",), repeats_kv=True, traffic=2.95, flash=0.48)

# Eager PyTorch, as torchtitan. AdamW without fused kernels creates two lists of temporaries.
_TRANSFORMERS = Framework(
    name="transformers", aliases=("huggingface", "hf", "accelerate", "trl", "axolotl", "llama-factory", "unsloth"),
    pattern=r"(?i)\bhf\b|transformers|axolotl|llama-factory|accelerate\b", update_bytes=8, offloads_often=True,
    traffic=2.95, flash=0.48, host_s=4.0e-3,
)  # fmt: skip

# The first whose pattern matches wins; the general ones stand last. Bytes: the frameworks' documentation; traffic,
# host_s and tp_hidden are fitted with the constants of plan/cost/compute.py. A framework without a timed row in the
# fitting data has those of the framework whose kernels it uses, or the defaults.
FRAMEWORKS: tuple[Framework, ...] = (
    # Its own code has fused norms and rotary embedding.
    replace(_TRANSFORMERS, name="qwen", aliases=(), pattern=r"QwenLM", traffic=1.5, flash=0.49),
    replace(
        _BRIDGE, name="megatron-bridge", aliases=("bridge",),
        pattern=r"Megatron-Bridge|Megatron-LM (examples|README)", counts_causal=True,
    ),
    replace(_DEEPSPEED, pattern=r"DeepSpeed ZeRO|DeepSpeed \(HF\)|microsoft/DeepSpeed"),
    replace(
        _OLD_MEGATRON, name="megatron-lm-2021", pattern=r"SC21|2205\.05198|Korthikanti|MT-NLG|OPT paper", traffic=0.8
    ),
    replace(_OLD_MEGATRON, name="alpa", pattern=r"(?i)\balpa\b", traffic=0.8),
    replace(_MEGATRON_DEEPSPEED, aliases=("deepspeed-megatron",), pattern=r"(?i)bigscience|megatron-deepspeed"),
    replace(_OLD_MEGATRON, name="vtrain", pattern=r"(?i)vtrain", traffic=0.45, host_s=0.71e-3, overlaps=True),
    replace(
        _MEGATRON, name="megatron-llama", pattern=r"(?i)megatron-llama",
        sequence_parallel=False, fused_mlp=False, logit_bytes=14,
    ),
    # Its step creates fp32 gradients, and torch's AdamW two lists of temporaries (internlm/solver/optimizer).
    replace(
        _MEGATRON, name="internevo", aliases=("internlm",), pattern=r"(?i)internevo", grad_bytes=2, reduce_bytes=2,
        update_bytes=12, regathers=False, fused_mlp=False, logit_bytes=14,
    ),
    replace(
        _MEGATRON, name="nanotron", pattern=r"(?i)nanotron", traffic=1.34, flash=0.6,
        regathers=False, fused_mlp=False, logit_bytes=14, even_stages=False,
    ),
    # Its default loss works in place on 16-bit logits (flash-attn's fused cross-entropy).
    Framework(
        name="composer", aliases=("llm-foundry", "mosaicml", "mpt"), pattern=r"(?i)llm-foundry", reduce_bytes=2,
        logit_bytes=4, traffic=0.92, flash=0.43,
    ),
    replace(_TORCHTITAN, pattern=r"(?i:torchtitan)|float8 and FSDP2"),
    Framework(
        name="litgpt", aliases=("lit-gpt", "lightning", "thunder"), pattern=r"(?i)litgpt|lit-gpt", weight_bytes=2,
        grad_bytes=2, optimizer_bytes=4, reduce_bytes=2, plain_norms=True,
    ),
    # Megatron's model and FlashAttention under DeepSpeed's ZeRO-1.
    replace(
        _MEGATRON_DEEPSPEED, name="gpt-neox", aliases=("neox",), pattern=r"(?i)neox", plain_attention=False, traffic=1.4
    ),
    Framework(
        name="colossalai", aliases=("colossal-ai", "gemini"), pattern=r"(?i)colossal", weight_bytes=2, grad_bytes=2,
        optimizer_bytes=12, reduce_bytes=2,
    ),
    # XLA fuses pointwise kernels; fp32 weights, sharded over all ranks.
    Framework(
        name="maxtext", aliases=("levanter", "jax"), pattern=r"(?i)maxtext|levanter", traffic=1.0, fused_mlp=True,
        host_s=0.0, logit_bytes=10,
    ),
    # Its tables count attention in full.
    replace(
        _BRIDGE, name="nemo", aliases=("nemo-framework", "nemo-megatron", "bignlp"),
        pattern=r"NeMo|nemo-framework|BigNLP|(?i:dgxc)|DGX Cloud", traffic=0.98, flash=0.59, tp_hidden=0.61,
    ),
    # NeMo's kernels; overlap of communication is off by default (megatron/training/arguments.py).
    replace(
        _MEGATRON, aliases=("mcore", "megatron", "megatron-lm"), pattern=r"(?i)megatron|simumax|megascale|mcore",
        traffic=0.98, flash=0.59, overlaps=False, ddp_may_shard=True,
    ),
    _TRANSFORMERS,
    replace(_DEEPSPEED, pattern=r"(?i)deepspeed|\bzero-[123]"),
    # torchtitan's kernels and sharding.
    replace(
        _TORCHTITAN, name="fsdp", aliases=("fms-fsdp", "pytorch", "torch", "fsdp2", "olmo", "lingua"),
        pattern=r"FSDP|(?i:fully_shard|pytorch|olmo)|TinyLlama", repeats_kv=False,
        reduce_bytes=2, has_recipe=False,
    ),
    CLUSTERTRAIN,
)  # fmt: skip


def find_framework(text: str) -> Framework | None:
    """Return the framework that ``text``, a row's source and note, names; None if it names none."""
    return next((f for f in FRAMEWORKS if f.pattern and re.search(f.pattern, text)), None)


def find_by_name(name: str) -> Framework | None:
    """Return the framework with this name or alias, with or without a version, or the one that the text names.

    ``TorchTitan v0.1`` is torchtitan, and ``NVIDIA NeMo 25.04`` nemo. None: there is none.
    """
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    keys = (key, _VERSION.sub("", key))
    return next((f for k in keys for f in FRAMEWORKS if k in (f.name, *f.aliases)), None) or find_framework(name)


def get_framework(name: str) -> Framework:
    """Return the framework with this name or alias, which is known."""
    return next(f for f in FRAMEWORKS if name in (f.name, *f.aliases))


def suggest_name(name: str) -> str | None:
    """Return the name or alias that is most similar to ``name``, or None if none is similar."""
    names = [n for f in FRAMEWORKS for n in (f.name, *f.aliases)]
    return next(iter(difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)), None)


def with_half_states(framework: Framework) -> Framework:
    """Return ``framework`` with weights, gradients and moments in 16 bit, without fp32 copies."""
    return replace(framework, weight_bytes=2, grad_bytes=2, optimizer_bytes=4, reduce_bytes=2)


def with_optimizer(framework: Framework, optim: OptimSpec, state: OptimizerStateSize) -> Framework:
    """Return ``framework`` with a recipe's optimizer; frozen parameters have no gradient."""
    return replace(
        framework,
        optim=optim,
        optimizer_bytes=state.bytes_per_param,
        grad_bytes=framework.grad_bytes * state.trained_fraction,
    )


def with_adapter(framework: Framework, optim: OptimSpec, adapter: AdapterShape, state: OptimizerStateSize) -> Framework:
    """Return ``framework`` with adapters, which alone have gradients and state; the base is frozen."""
    return replace(framework, optim=optim, adapter=adapter, optimizer_bytes=state.bytes_per_param)


def with_compiled_blocks(framework: Framework) -> Framework:
    """Return ``framework`` with torch.compile per block, which fuses pointwise kernels and halves the launches."""
    return replace(
        framework, traffic=framework.traffic / 2, host_s=framework.host_s / 2, fused_mlp=True, plain_norms=False
    )


def with_compiled_model(framework: Framework) -> Framework:
    """Return ``framework`` with model and loss compiled, which saves one fp32 copy of the logits."""
    return replace(with_compiled_blocks(framework), logit_bytes=min(framework.logit_bytes, 10))


def with_liger(framework: Framework) -> Framework:
    """Return ``framework`` with Liger's kernels (arXiv 2410.10989): fused norms and SwiGLU, chunked head and loss.

    The chunks are smaller by the ratio of vocabulary to width (section 3.2): about 6 bytes for a 20th to a 30th of the
    logits.
    """
    return replace(framework, fused_mlp=True, plain_norms=False, logit_bytes=0.25)
