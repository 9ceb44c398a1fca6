"""The framework with which a row of a table was run: stated, named in the row's text, or inferred from its layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from clustertrain.config.hardware import GpuType
from clustertrain.plan.cost import frameworks
from clustertrain.plan.cost.frameworks import Framework
from clustertrain.plan.table.cells import cell, parse_number

MAX_OLD_SEQ_LEN = 2048
_UNSTATED = ("", "unknown", "n/a", "na", "none", "-", "?", "custom", "in-house", "other")
_RECENT_MODELS = re.compile(r"llama|qwen|mistral|mixtral|internlm|gemma|deepseek|nemotron|olmo", re.IGNORECASE)
_BLOCK_SCALED = re.compile(r"mx|fp4", re.IGNORECASE)


def find_row_framework(row: Mapping[str, str], gpu: GpuType) -> tuple[Framework, str]:
    """Return the row's framework, and a note if its column ``framework`` names none that is known.

    Raises:
        ConfigError: a cell is not a number.
    """
    name, text = cell(row, "framework"), f"{cell(row, 'source')} {cell(row, 'note')}"
    is_stated = name.lower() not in _UNSTATED
    stated = frameworks.find_by_name(name) if is_stated else None
    if stated is not None:
        return _adapt(row, _by_age(stated, row, gpu)), ""
    problem = _describe_unknown(name) if is_stated else "framework is not stated"
    named = frameworks.find_framework(text)
    if named is not None:
        framework, reason = named, "as in the row's text"
    else:
        usual, purpose = _infer_name(row)
        framework, reason = frameworks.get_framework(usual), f"usual {purpose}"
    framework = _adapt(row, _by_age(framework, row, gpu))
    is_known = named is not None and not is_stated
    return framework, "" if is_known else f"{problem}: {framework.name}, {reason}"


def _describe_unknown(name: str) -> str:
    similar = frameworks.suggest_name(name)
    return f"framework = {name!r} is not known{f' (did you mean {similar}?)' if similar else ''}"


def _infer_name(row: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of the framework that a reader expects, and for what."""
    sharding = cell(row, "fsdp_or_zero")
    if sharding.startswith("fsdp") or sharding == "hsdp":
        return "fsdp", f"for {sharding}"
    if _BLOCK_SCALED.search(cell(row, "precision")):
        return "nemo", f"for {cell(row, 'precision')}"
    degree = next((name for name in ("tp", "pp", "cp") if cell(row, name) not in ("", "0", "1")), "")
    if degree:
        return "megatron-core", f"for {degree} {cell(row, degree)}"
    if sharding == "hier_zero1":
        return "internevo", f"for {sharding}"
    if sharding.startswith("zero"):
        return "deepspeed", f"for {sharding}"
    return "fsdp", "without tensor and pipeline degrees"


def _by_age(framework: Framework, row: Mapping[str, str], gpu: GpuType) -> Framework:
    """Return Megatron as it was before FlashAttention for a row that could be so old.

    That is a row without fp8 GPU, bf16, long sequence and a model family of 2023 or later.
    """
    is_recent = (
        gpu.fp8_tflops
        or cell(row, "precision").lower().startswith(("bf", "amp_bf"))
        or _RECENT_MODELS.search(cell(row, "model"))
        or parse_number(row, "seq") > MAX_OLD_SEQ_LEN
    )
    if framework.name != "megatron-core" or is_recent:
        return framework
    return frameworks.get_framework("megatron-lm-2021")


def _adapt(row: Mapping[str, str], framework: Framework) -> Framework:
    """Return ``framework`` with the row's options: sequence parallelism, kind of ZeRO, types of its states."""
    sharding, note, precision = cell(row, "fsdp_or_zero"), cell(row, "note"), cell(row, "precision")
    if sharding.startswith("zero") and framework.name == "transformers":  # its kernels, DeepSpeed's states
        deepspeed = frameworks.get_framework("deepspeed")
        framework = replace(deepspeed, traffic=framework.traffic, host_s=framework.host_s)
    if re.search(r"no sequence parallel|no SP\b", note):
        framework = replace(framework, sequence_parallel=False)
    elif re.search(r"sequence parallel on|SP on|SP \+", note):
        framework = replace(framework, sequence_parallel=True)
    if "fp32 grad" in precision and framework.grad_bytes == 2:  # kept beside those of the backward pass
        framework = replace(framework, grad_bytes=2 + 4, reduce_bytes=4)
    if re.search(r"\btrue\b|\bpure\b", precision.lower()):
        framework = frameworks.with_half_states(framework)
    if "Liger" in note:
        framework = frameworks.with_liger(framework)
    return replace(framework, shards_gradients=sharding in ("zero2", "zero2_like"))
