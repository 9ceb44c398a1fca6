"""The framework of a table row: named in its column, named in its text, or inferred from its layout."""

from __future__ import annotations

import pytest

from clustertrain.plan.cost.frameworks import FRAMEWORKS, find_by_name, find_framework, get_framework
from clustertrain.plan.table.predict import predict
from clustertrain.plan.table.rows import parse_row
from tests.unit.plan.table.test_rows import LLAMA_8B, row


@pytest.mark.parametrize(
    ("cell", "name"),
    [("torchtitan", "torchtitan"), ("NeMo", "nemo"), ("Megatron_LM", "megatron-core"), ("mcore", "megatron-core"),
     ("llm-foundry", "composer"), ("GPT NeoX", "gpt-neox"), ("axolotl", "transformers"), ("colossal-ai", "colossalai"),
     ("levanter", "maxtext"), ("fms-fsdp", "fsdp"), ("ours", "clustertrain"), (" DeepSpeed ", "deepspeed"),
     ("NVIDIA NeMo 25.04", "nemo"), ("Megatron-LM core v0.8", "megatron-core"), ("HF Trainer", "transformers")],
)  # fmt: skip
def test_column_names_framework(cell: str, name: str) -> None:
    parsed = row(framework=cell, source="bigscience")  # the column decides
    assert parsed.framework.name == name and parsed.framework_note == ""


@pytest.mark.parametrize(
    ("cell", "name"),
    [("TorchTitan v0.1", "torchtitan"), ("Nanotron", "nanotron"), ("LitGPT", "litgpt"), ("nanotron 0.4", "nanotron"),
     ("lit-gpt-0.5.3", "litgpt"), ("Megatron-Core 0.12", "megatron-core"), ("InternEvo-v0.3", "internevo"),
     ("DeepSpeed-Megatron", "megatron-deepspeed"), ("PyTorch 2.6", "fsdp"), ("NeMo Framework 25.04", "nemo")],
)  # fmt: skip
def test_name_is_known_in_any_case_and_with_a_version(cell: str, name: str) -> None:
    parsed = row(framework=cell, source="bigscience")
    assert parsed.framework.name == name and parsed.framework_note == ""


@pytest.mark.parametrize(
    ("source", "name"),
    [("Nanotron v0.4", "nanotron"), ("LitGPT", "litgpt"), ("TorchTitan blog", "torchtitan"), ("stanford alpaca", "")],
)
def test_text_names_framework_in_any_case(source: str, name: str) -> None:
    found = find_framework(source)
    assert (found.name if found else "") == name


@pytest.mark.parametrize("cell", ["unknown", "n/a", "-", "?", "custom", "In-house"])
@pytest.mark.parametrize("cells", [{}, {"tp": "8"}, {"source": "bigscience"}])
def test_placeholder_is_a_framework_that_is_not_stated(cell: str, cells: dict[str, str]) -> None:
    assert row(framework=cell, **cells) == row(**cells)


@pytest.mark.parametrize("cell", ["torchtune", "veScale", "acme-trainer 3"])
def test_unknown_name_is_inferred_with_a_note(cell: str) -> None:
    for cells, name, reason in (
        ({}, "fsdp", "usual without tensor and pipeline degrees"), ({"tp": "8"}, "megatron-core", "usual for tp 8"),
        ({"source": "bigscience"}, "megatron-deepspeed", "as in the row's text"),
    ):  # fmt: skip
        named, bare = row(framework=cell, **cells), row(**cells)
        assert named.framework == bare.framework and named.framework.name == name
        assert named.framework_note == f"framework = {cell!r} is not known: {name}, {reason}"
    (prediction,) = predict([{**LLAMA_8B, "framework": cell}])
    assert prediction.fits is not None and f"framework = {cell!r} is not known: fsdp" in prediction.note


def test_similar_name_is_suggested() -> None:
    assert row(framework="torchtitn").framework_note.startswith(
        "framework = 'torchtitn' is not known (did you mean torchtitan?): fsdp, usual "
    )


def test_names_are_unique() -> None:
    names = [name for framework in FRAMEWORKS for name in {framework.name, *framework.aliases}]
    # DeepSpeed has two patterns, one before the more general ones.
    assert sorted(set(names)) == sorted({*names}) and names.count("deepspeed") == 2
    assert [n for n in set(names) - {"deepspeed", "zero"} if names.count(n) > 1] == []
    assert all(find_by_name(name) is not None for name in names)


@pytest.mark.parametrize(
    ("source", "name"),
    [("pytorch/torchtitan benchmarks", "torchtitan"), ("NVIDIA-NeMo/Megatron-Bridge docs", "megatron-bridge"),
     ("NVIDIA/NeMo docs/source/performance", "nemo"), ("docs.nvidia.com/nemo-framework", "nemo"),
     ("MooreThreads/SimuMax docs", "megatron-core"), ("mosaicml/llm-foundry: FSDP", "composer"),
     ("foundation-model-stack/fms-fsdp: PyTorch FSDP", "fsdp"), ("microsoft/Megatron-DeepSpeed", "megatron-deepspeed"),
     ("HF trainer with DeepSpeed", "transformers"), ("EleutherAI/gpt-neox", "gpt-neox")],
)  # fmt: skip
def test_text_names_framework(source: str, name: str) -> None:
    parsed = row(source=source)
    assert parsed.framework.name == name and parsed.framework_note == ""


@pytest.mark.parametrize(
    ("cells", "name", "reason"),
    [({"tp": "8"}, "megatron-core", "for tp 8"), ({"pp": "4"}, "megatron-core", "for pp 4"),
     ({"tp": "8", "gpu": "A100", "precision": "fp16", "model": "GPT", "seq": "2048"}, "megatron-lm-2021", "for tp 8"),
     ({"tp": "8", "gpu": "A100", "precision": "bf16"}, "megatron-core", "for tp 8"),
     ({"fsdp_or_zero": "fsdp_full", "tp": "8"}, "fsdp", "for fsdp_full"),
     ({"fsdp_or_zero": "hsdp"}, "fsdp", "for hsdp"),
     ({"fsdp_or_zero": "zero3"}, "deepspeed", "for zero3"), ({"fsdp_or_zero": "hier_zero1"}, "internevo", "hier_zero1"),
     ({"precision": "MXFP8", "gpu": "B200"}, "nemo", "for MXFP8"),
     ({}, "fsdp", "without tensor and pipeline degrees"), ({"source": "nobody knows"}, "fsdp", "without")],
)  # fmt: skip
def test_layout_implies_framework(cells: dict[str, str], name: str, reason: str) -> None:
    parsed = row(**cells)
    assert parsed.framework.name == name
    assert (
        parsed.framework_note.startswith(f"framework is not stated: {name}, usual ") and reason in parsed.framework_note
    )


@pytest.mark.parametrize(
    ("cells", "is_old"),
    [({}, True), ({"gpu": "A100"}, True), ({"gpu": "H100"}, False), ({"precision": "bf16"}, False),
     ({"model": "Llama-2-7B"}, False), ({"seq": "4096"}, False), ({"framework": "torchtitan"}, False)],
)  # fmt: skip
def test_old_megatron_wrote_scores_to_memory(cells: dict[str, str], is_old: bool) -> None:
    old = {**LLAMA_8B, "model": "GPT", "seq": "2048", "framework": "megatron-lm", "gpu": "V100", "precision": "fp16"}
    assert parse_row({**old, **cells}).framework.plain_attention == is_old


def test_row_options_change_framework() -> None:
    zero = row(framework="transformers", fsdp_or_zero="zero2")
    eager, deepspeed = get_framework("transformers"), get_framework("deepspeed")
    assert (zero.framework.traffic, zero.framework.optimizer_bytes) == (eager.traffic, deepspeed.optimizer_bytes)
    assert zero.framework.shards_gradients
    # 16-bit gradients and their fp32 sum; Megatron adds into fp32 gradients directly.
    precision = "bf16 (fp32 grad accumulation)"
    assert row(source="bigscience", precision=precision).framework.grad_bytes == 6
    assert row(framework="mcore", precision=precision).framework.grad_bytes == 4
    pure = row(framework="fsdp", precision="pure bf16").framework
    assert (pure.weight_bytes, pure.grad_bytes, pure.optimizer_bytes) == (2, 2, 4)
    assert row(framework="transformers", note="Liger kernels").framework.fused_mlp
