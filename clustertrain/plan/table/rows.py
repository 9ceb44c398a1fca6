"""Rows of a table of published configurations as model, layout, pass, framework and hardware.

Columns and conventions are those of the survey behind the table. Empty cells get the defaults defined here. An invalid
row raises ConfigError, which becomes its ``pred_note``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from clustertrain.config import hardware
from clustertrain.config.hardware import GpuType
from clustertrain.config.parallel import ParallelSpec
from clustertrain.errors import ConfigError
from clustertrain.plan.batch import divisors
from clustertrain.plan.cost import collectives, frameworks
from clustertrain.plan.cost.activations import PassConfig
from clustertrain.plan.cost.frameworks import Framework
from clustertrain.plan.cost.model_shape import DecoderSizes
from clustertrain.plan.layout import Layout, Strategy
from clustertrain.plan.table.cells import cell, parse_number, with_usual_spelling
from clustertrain.plan.table.framework import find_row_framework

DEFAULT_SEQ_LEN, DEFAULT_VOCAB_SIZE = 2048, 50_304
MAX_LAYERS = 10_000  # larger values are mistakes
GPUS_PER_NODE = 8  # in DGX and HGX systems; 4 in a tray of an NVL72
_STRATEGIES: Mapping[str, Strategy] = {
    "fsdp_full": "fsdp", "zero3": "fsdp", "fsdp_grad_op": "fsdp-grad-op", "hsdp": "hybrid-shard", "zero1": "zero1",
    "hier_zero1": "zero1", "zero2": "zero1", "zero2_like": "zero1", "ddp": "ddp", "none": "ddp",
}  # fmt: skip
_PRECISIONS = (
    (r"fp4", "fp4"),
    (r"mx|alternative granularity", "mxfp8"),
    (r"fp8", "fp8"),
    # Before the others: mixed precision is often named with the type of its gradients or master weights.
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|half", "fp16"),
    (r"tf32", "tf32"),
    (r"fp32", "fp32"),
)
_STATED_IN_TEXT = {
    "gradients": r"fp32 grad", "sequence parallelism": r"[Ss]equence parallel|\bSP\b", "offload": r"offload|Offload",
    "weights and moments": r"\btrue\b|\bpure\b",
}  # fmt: skip
_MIXTURES = re.compile(r"\d+x\d+b|[-_]a\d+b|moe\b|deepseek-?_?v[234]|gpt.?oss", re.IGNORECASE)
RING_ATTENTION = ParallelSpec(context_parallel_method="ring")  # context parallelism in the frameworks of the table
# Model families with SwiGLU, if the number of parameters does not decide.
_GATED_FAMILIES = re.compile(r"llama|qwen|mistral|internlm|gemma", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A row; empty ``activation_checkpointing`` and 0 in ``micro_batch``, ``global_batch``, ``gpus``: unstated."""

    shape: DecoderSizes
    layout: Layout
    seq_len: int
    micro_batch: int
    global_batch: int
    activation_checkpointing: str
    precision: str
    compiled: bool
    framework: Framework
    gpu: GpuType
    capacity_gib: float
    gpus_per_node: int
    fabric_gb_s: float
    gpus: int
    has_layout: bool  # the layout is stated
    stated: frozenset[str]  # columns with a value, and what the text states otherwise (_find_stated)
    framework_note: str  # why this framework, if the row names none that is known

    @property
    def grad_accum(self) -> int:
        micro_batch = max(1, self.micro_batch)
        if not self.global_batch:
            return 4 * self.layout.pp if self.layout.pp > 1 else 1
        return max(1, round(self.global_batch / (micro_batch * self.layout.data_parallel)))

    @property
    def network(self) -> collectives.Network:
        return collectives.build_network(self.gpu, self.gpus_per_node, self.fabric_gb_s)

    def build_pass_config(self) -> PassConfig:
        """Return the configuration of one forward and backward pass."""
        return PassConfig(
            seq_len=self.seq_len,
            micro_batch=max(1, self.micro_batch),
            grad_accum=self.grad_accum,
            precision="fp8" if self.precision in ("fp8", "mxfp8", "fp4") else "bf16",
            device="cuda",
            parallel=RING_ATTENTION,
        )


def parse_row(row: Mapping[str, str]) -> TableRow:
    """Parse a row.

    Raises:
        ConfigError: an unknown GPU type, an invalid number, contradictory degrees, a mixture of experts.
    """
    row = with_usual_spelling(row)
    if parse_number(row, "ep") > 1 or _MIXTURES.search(cell(row, "model")):
        raise ConfigError(f"{cell(row, 'model') or 'the model'} is a mixture of experts, which is not predicted")
    gpu = find_row_gpu(row)
    framework, framework_note = find_row_framework(row, gpu)
    if cell(row, "fsdp_or_zero") == "hier_zero1":
        groups = max(1, int(parse_number(row, "hsdp_replicate", 1)))
        framework = replace(framework, zero_group=int(parse_number(row, "dp")) // groups)
    is_compiled = (row.get("compile") or "no").strip().lower() not in ("no", "")
    layout = parse_layout(row, framework)
    shape = parse_shape(row)
    return TableRow(
        shape=shape,
        layout=layout,
        seq_len=int(parse_number(row, "seq")) or DEFAULT_SEQ_LEN,
        micro_batch=int(parse_number(row, "micro_bs")),
        global_batch=int(parse_number(row, "global_bs_seqs")),
        activation_checkpointing=_parse_checkpointing(row),
        precision=_parse_precision(row),
        compiled=is_compiled,
        framework=frameworks.with_compiled_model(framework) if is_compiled else framework,
        gpu=gpu,
        capacity_gib=parse_number(row, "gpu_mem_gib") or gpu.capacity_gib,
        gpus_per_node=_parse_gpus_per_node(row, gpu),
        fabric_gb_s=parse_fabric_gb_s(f"{cell(row, 'source')} {cell(row, 'note')}", gpu),
        gpus=int(parse_number(row, "n_gpus")) or _parse_gpus(row.get("note") or "") or int(parse_number(row, "dp")),
        has_layout=any(cell(row, name) for name in ("tp", "pp", "dp", "fsdp_or_zero")) or layout.cp > 1,
        stated=_find_stated(row, framework, is_recipe_known=framework.has_recipe and not framework_note),
        framework_note=framework_note,
    )


def _find_stated(row: Mapping[str, str], framework: Framework, *, is_recipe_known: bool) -> frozenset[str]:
    """Return the names of the stated settings: columns, and those without a column by the precision or note.

    Args:
        is_recipe_known: the row names a framework whose types and loss are known.
    """
    columns = {name for name in row if cell(row, name)} - {"framework"}
    if framework.ddp_may_shard and cell(row, "fsdp_or_zero") in ("ddp", "none"):
        columns -= {"fsdp_or_zero"}
    text = f"{cell(row, 'precision')} {cell(row, 'note')}"
    settings = {name for name, pattern in _STATED_IN_TEXT.items() if re.search(pattern, text)}
    return frozenset(columns | settings | ({"framework"} if is_recipe_known else set()))


def find_row_gpu(row: Mapping[str, str]) -> GpuType:
    """Return the row's GPU type. Raise ConfigError if it is unknown."""
    name, size = (row.get("gpu") or "").strip(), parse_number(row, "gpu_mem_gib")
    match = (hardware.find_gpu_type(f"{name}-{size:g}gb") if size else None) or hardware.find_gpu_type(name)
    if match is None:
        known_types = ", ".join(gpu.name for gpu in hardware.CATALOG)
        raise ConfigError(f"gpu = {name!r} is not known; known: {known_types}")
    return match


def _parse_gpus_per_node(row: Mapping[str, str], gpu: GpuType) -> int:
    return int(parse_number(row, "gpus_per_node")) or (4 if gpu.domain else GPUS_PER_NODE)


def parse_fabric_gb_s(text: str, gpu: GpuType) -> float:
    """Return the GB/s per GPU of the network in ``text`` (``4x200Gb``, ``1600 Gbps``, AWS's ``p5``), or 0."""
    cloud = re.search(r"\b(p3dn|p4d|p5)\b", text)
    if cloud:
        return hardware.parse_node_gb_s(f"efa-{cloud[1]}") / GPUS_PER_NODE
    per_nic = re.search(r"(\d{1,6})\s*x\s*(\d{1,6})\s*Gb", text)
    if per_nic:
        return int(per_nic[1]) * int(per_nic[2]) / 8 / GPUS_PER_NODE
    total = re.search(r"(\d{1,6})\s*Gbps", text)
    return int(total[1]) / 8 / GPUS_PER_NODE if total else 0.0


def _parse_precision(row: Mapping[str, str]) -> str:
    text = (row.get("precision") or "").lower()
    return next((name for pattern, name in _PRECISIONS if re.search(pattern, text.split("(")[0])), "bf16")


def _parse_checkpointing(row: Mapping[str, str]) -> str:
    text = (row.get("act_ckpt") or "").strip()
    if text in ("", "none", "full", "selective_op", "selective_layer", "selective_attn"):
        return text
    if text.startswith("selective"):
        return "selective_attn"
    choices = "none, full, selective_attn, selective_op, selective_layer"
    raise ConfigError(f"act_ckpt = {text!r} is not known; known: {choices}")


def parse_layout(row: Mapping[str, str], framework: Framework) -> Layout:
    """Return the row's layout. Raise ConfigError if its degrees contradict each other."""
    tp, pp, cp = (max(1, int(parse_number(row, name, 1))) for name in ("tp", "pp", "cp"))
    gpus = int(parse_number(row, "n_gpus")) or _parse_gpus(row.get("note") or "")
    if gpus and gpus % (tp * pp * cp):
        raise ConfigError(f"tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp} does not divide n_gpus = {gpus}")
    dp = int(parse_number(row, "dp")) or max(1, gpus // (tp * pp * cp))
    if gpus and dp * tp * pp * cp != gpus:
        dp = max(1, gpus // (tp * pp * cp))
    sharding = (row.get("fsdp_or_zero") or "").strip()
    if sharding and sharding not in _STRATEGIES:
        raise ConfigError(f"fsdp_or_zero = {sharding!r} is not known; known: {', '.join(_STRATEGIES)}")
    strategy = _STRATEGIES.get(sharding, framework.sharding)
    if strategy == "ddp" and framework.distributed_optimizer:
        strategy = "zero1"
    groups = max(1, int(parse_number(row, "hsdp_replicate", 1)))
    if strategy in ("fsdp", "fsdp-grad-op") and groups > 1:
        strategy = "hybrid-shard"
    if strategy == "hybrid-shard" and dp % groups:
        raise ConfigError(f"hsdp_replicate = {groups} does not divide {dp} data-parallel ranks")
    sharded = strategy in ("fsdp", "fsdp-grad-op", "hybrid-shard")
    virtual_stages = max(1, int(parse_number(row, "vpp", 1)))
    # If a row states sharding but not the number of ranks, a later step finds the number that fits.
    is_size_known = gpus or int(parse_number(row, "dp")) or not sharding
    # Ranks that share a sequence also share the states that fully_shard and ZeRO-1 divide.
    if dp == 1 and not ((sharded or strategy == "zero1") and cp > 1) and not (sharded and not is_size_known):
        strategy = "single"
    return Layout(
        strategy=strategy,
        dp_replicate=(groups if strategy == "hybrid-shard" else 1) if sharded else dp,
        dp_shard=(dp // groups if strategy == "hybrid-shard" else dp) if sharded else 1,
        zero1=strategy == "zero1",
        tp=tp,
        sequence_parallel=framework.sequence_parallel and tp > 1,
        cp=cp,
        pp=pp,
        schedule=("interleaved" if virtual_stages > 1 else "1f1b") if pp > 1 else None,
        virtual_stages=virtual_stages if pp > 1 else 1,
        reshard_after_forward=strategy != "fsdp-grad-op",
        offload=strategy not in ("single", "ddp")
        and bool(re.search(r"CPU[^;,]* offload(?! False)", row.get("note") or "")),
    )


def _parse_gpus(note: str) -> int:
    """Return the first number of GPUs in ``one of 128/256/512`` or ``128..512 GPUs``; 0 if there is none."""
    match = re.search(r"one of (\d{1,9})/", note) or re.search(r"(\d{1,9})\.\.\d+ GPUs", note)
    return int(match[1]) if match else 0


def _parse_parameters(row: Mapping[str, str]) -> float:
    """Return the number of parameters from its column or the model's name (``LLaMA-13B``); 0 if unknown."""
    match = re.search(r"(\d{1,6}(?:\.\d+)?)\s*[bB]\b", row.get("model") or "")
    return (parse_number(row, "n_params_b") or (float(match[1]) if match else 0.0)) * 1e9


def parse_shape(row: Mapping[str, str]) -> DecoderSizes:
    """Return the model's sizes; missing ones are inferred from the number of parameters."""
    parameters = _parse_parameters(row)
    layers, dim = int(parse_number(row, "layers")), int(parse_number(row, "hidden"))
    vocab = int(parse_number(row, "vocab")) or DEFAULT_VOCAB_SIZE
    if not (dim and layers) and not parameters:
        raise ConfigError("neither n_params_b nor hidden and layers are given: the size of the model is not known")
    dim = dim or _estimate_width(parameters)
    hidden = int(parse_number(row, "ffn")) or 4 * dim
    gated = hidden != 4 * dim
    heads = int(parse_number(row, "heads")) or _estimate_heads(dim)
    if dim % heads:
        raise ConfigError(f"heads = {heads} does not divide hidden = {dim}")
    base = DecoderSizes(
        vocab_size=vocab, dim=dim, layers=1, heads=heads, kv_heads=int(parse_number(row, "kv_heads")) or heads,
        hidden=hidden, gated=gated,
    )  # fmt: skip
    if not layers:
        tables = 2 if gated else 1
        layers = max(1, round((parameters - tables * vocab * dim) / base.block_parameters()))
    if layers > MAX_LAYERS:
        raise ConfigError(f"{layers} layers of width {dim} are too many: check n_params_b, hidden and layers")
    candidates = [
        replace(base, layers=layers, gated=g, tie_embeddings=t)
        for g in ((True, False) if _GATED_FAMILIES.search(row.get("model") or "") else (False, True))
        for t in (False, True)
    ]
    if not parameters:
        return replace(base, layers=layers, tie_embeddings=not gated)
    return min(candidates, key=lambda s: round(abs(s.parameters() / parameters - 1), 2))


def _estimate_width(parameters: float) -> int:
    """Return the width of a decoder with 12 L h^2 parameters and about h / 128 layers, a multiple of 128."""
    return max(1, round(math.cbrt(parameters * 128 / 12) / 128)) * 128


def _estimate_heads(dim: int) -> int:
    """Return the number of heads whose size is 128 or the nearest that divides the width."""
    return min(divisors(dim), key=lambda n: abs(dim / n - 128))
