"""Parsing of a table row: its terms, and the defaults of empty cells."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout
from clustertrain.plan.table import rows
from clustertrain.plan.table.rows import TableRow, parse_row

LLAMA_8B = {
    "model": "Llama-3.1-8B", "n_params_b": "8.03", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
    "ffn": "14336", "vocab": "128256", "seq": "8192", "gpu": "H100", "n_gpus": "64", "act_ckpt": "full",
    "precision": "bf16", "micro_bs": "1", "global_bs_seqs": "128",
}  # fmt: skip


def row(**cells: str) -> TableRow:
    return parse_row({**LLAMA_8B, **cells})


def layout(**cells: str) -> Layout:
    return row(**cells).layout


def test_complete_row_is_parsed() -> None:
    parsed = row(fsdp_or_zero="fsdp_full", dp="64", tp="1", pp="1", gpu_mem_gib="80", gpus_per_node="4", compile="yes")
    assert parsed.layout == Layout(strategy="fsdp", dp_shard=64)
    assert (parsed.seq_len, parsed.micro_batch, parsed.global_batch, parsed.grad_accum) == (8192, 1, 128, 2)
    assert (parsed.gpu.name, parsed.capacity_gib, parsed.gpus_per_node, parsed.activation_checkpointing) == (
        "h100",
        80,
        4,
        "full",
    )
    assert parsed.shape.parameters() == pytest.approx(8.03e9, rel=0.001) and parsed.shape.gated
    assert parsed.compiled and parsed.has_layout


@pytest.mark.parametrize(
    ("column", "field", "default"),
    [
        ("seq", "seq_len", rows.DEFAULT_SEQ_LEN),
        ("gpu_mem_gib", "capacity_gib", 80),
        ("gpus_per_node", "gpus_per_node", 8),
        ("precision", "precision", "bf16"),
        ("compile", "compiled", False),
        ("micro_bs", "micro_batch", 0),
        ("global_bs_seqs", "global_batch", 0),
        ("act_ckpt", "activation_checkpointing", ""),
        ("n_gpus", "gpus", 0),
    ],
)
def test_empty_cell_has_default(column: str, field: str, default: Any) -> None:
    assert getattr(row(**{column: ""}), field) == default
    without = {name: cell for name, cell in LLAMA_8B.items() if name != column}
    assert getattr(parse_row(without), field) == default


def test_missing_sizes_follow_from_parameters() -> None:
    bare = parse_row({"model": "GPT", "n_params_b": "175", "gpu": "A100"}).shape
    assert bare.parameters() == pytest.approx(175e9, rel=0.05)
    assert bare.dim % 128 == 0 and 96 <= bare.dim / bare.heads <= 160 and bare.hidden == 4 * bare.dim
    assert bare.vocab_size == rows.DEFAULT_VOCAB_SIZE and bare.kv_heads == bare.heads
    named = parse_row({"model": "LLaMA-13B", "gpu": "A100"}).shape
    assert named.parameters() == pytest.approx(13e9, rel=0.05)
    assert row(layers="").shape.layers == 32 and row(kv_heads="").shape.kv_heads == 32


def test_model_without_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="size of the model is not known"):
        parse_row({"model": "large", "gpu": "A100"})


def test_gating_follows_from_parameters() -> None:
    gpt = {"model": "GPT", "layers": "24", "hidden": "2048", "heads": "16", "gpu": "A100", "vocab": "51200"}
    assert parse_row({**gpt, "n_params_b": "1.3"}).shape.gated is False
    assert row().shape.gated is True
    assert parse_row({**gpt, "model": "Llama", "ffn": "5504", "n_params_b": "1.4"}).shape.gated is True


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"fsdp_or_zero": "zero3"}, Layout(strategy="fsdp", dp_shard=64)),
        ({"fsdp_or_zero": "hsdp", "hsdp_replicate": "8"}, Layout(strategy="hybrid-shard", dp_replicate=8, dp_shard=8)),
        ({"fsdp_or_zero": "fsdp_full", "hsdp_replicate": "2"},
         Layout(strategy="hybrid-shard", dp_replicate=2, dp_shard=32)),
        ({"fsdp_or_zero": "fsdp_grad_op"}, Layout(strategy="fsdp-grad-op", dp_shard=64, reshard_after_forward=False)),
        ({"fsdp_or_zero": "zero1"}, Layout(strategy="zero1", dp_replicate=64, zero1=True)),
        ({"fsdp_or_zero": "zero2"}, Layout(strategy="zero1", dp_replicate=64, zero1=True)),
        ({"fsdp_or_zero": "ddp"}, Layout(strategy="ddp", dp_replicate=64)),
        ({}, Layout(strategy="fsdp", dp_shard=64)),
        ({"tp": "8", "pp": "8"}, Layout(tp=8, sequence_parallel=True, pp=8, schedule="1f1b")),
        ({"tp": "8", "pp": "4", "vpp": "2"},
         Layout(strategy="zero1", dp_replicate=2, zero1=True, tp=8, sequence_parallel=True, pp=4,
                schedule="interleaved", virtual_stages=2)),
        ({"n_gpus": "1", "fsdp_or_zero": "zero3"}, Layout()),
        ({"n_gpus": "8", "cp": "8", "fsdp_or_zero": "fsdp_full"}, Layout(strategy="fsdp", cp=8)),
        ({"n_gpus": "8", "cp": "8", "fsdp_or_zero": "zero1"}, Layout(strategy="zero1", zero1=True, cp=8)),
        ({"n_gpus": "8", "fsdp_or_zero": "zero2", "note": "CPU offload"},
         Layout(strategy="zero1", zero1=True, dp_replicate=8, offload=True)),
        # The number of GPUs decides if dp contradicts it.
        ({"n_gpus": "64", "dp": "64", "tp": "8", "fsdp_or_zero": "fsdp_full"},
         Layout(strategy="fsdp", dp_shard=8, tp=8, sequence_parallel=True)),
    ],
    ids=["zero3", "hsdp", "fsdp-replicated", "grad-op", "zero1", "zero2", "ddp", "default", "tp-pp", "interleaved",
         "one-gpu", "cp", "cp-zero1", "zero2-offload", "gpus-decide"],
)  # fmt: skip
def test_row_layout(cells: dict[str, str], expected: Layout) -> None:
    assert layout(**cells) == expected
    assert expected.world_size == int(cells.get("n_gpus", "64"))


@pytest.mark.parametrize(
    ("cell", "spelling"),
    [("FSDP", "fsdp_full"), ("zero-3", "zero3"), ("ZeRO_3", "zero3"), ("zero 1", "zero1"),
     ("zero_2_like", "zero2_like"), ("fully_shard", "fsdp_full"), ("SHARD_GRAD_OP", "fsdp_grad_op"),
     ("Hybrid_Shard", "hsdp"), ("DDP", "ddp")],
)  # fmt: skip
def test_sharding_in_other_spellings(cell: str, spelling: str) -> None:
    assert row(fsdp_or_zero=cell, hsdp_replicate="2") == row(fsdp_or_zero=spelling, hsdp_replicate="2")


@pytest.mark.parametrize(
    ("cell", "precision"),
    [("bf16", "bf16"), ("BF16 (fp32 grad accumulation)", "bf16"), ("amp_bf16", "bf16"), ("fp16", "fp16"),
     ("FP8", "fp8"), ("FP8-MX", "mxfp8"), ("NVFP4", "fp4"), ("fp32", "fp32"), ("tf32", "tf32"),
     ("bf16 + fp32 grads", "bf16"), ("bf16, fp32 master weights", "bf16"), ("bf16/fp32", "bf16"),
     ("BF16-FP32 mixed", "bf16"), ("bfloat16", "bf16"), ("fp16/fp32", "fp16"), ("fp8 + bf16", "fp8")],
)  # fmt: skip
def test_precisions(cell: str, precision: str) -> None:
    assert row(precision=cell).precision == precision


@pytest.mark.parametrize(
    ("cell", "mode"),
    [("", ""), ("none", "none"), ("full", "full"), ("Full", "full"), ("selective_op", "selective_op"),
     ("selective_attn",) * 2, ("selective core_attn+layernorm", "selective_attn")],
)  # fmt: skip
def test_activation_checkpointing(cell: str, mode: str) -> None:
    assert row(act_ckpt=cell).activation_checkpointing == mode


def test_gpus_by_name_and_memory() -> None:
    assert row(gpu="A100", gpu_mem_gib="80").gpu.name == row(gpu="A100", gpu_mem_gib="80.0").gpu.name == "a100-80gb"
    assert row(gpu="A100", gpu_mem_gib="40").gpu.name == "a100"
    assert row(gpu="GB200", gpu_mem_gib="").gpus_per_node == 4
    with pytest.raises(ConfigError, match=r"gpu = 'X9000' is not known; known: .*h100.*mi300x"):
        row(gpu="X9000")


def test_settings_in_source_and_note() -> None:
    assert row(source="Megatron-LM SC21", tp="8", note="no sequence parallel").layout.sequence_parallel is False
    assert row(note="4x200Gb network").fabric_gb_s == 12.5 and row(note="1600 Gbps").fabric_gb_s == 25
    assert row().fabric_gb_s == 0 and row().network.fabric_bytes_s > 0


def test_stated_settings() -> None:
    bare = row(micro_bs="", note="")
    assert "seq" in bare.stated and "micro_bs" not in bare.stated and "framework" not in bare.stated
    named = row(source="torchtitan", precision="bf16 (fp32 grad accumulation)", note="SP on, CPU offload")
    assert named.stated >= {"framework", "gradients", "sequence parallelism", "offload"}
    # A library leaves types and loss to its users.
    assert "framework" not in row(framework="fsdp").stated and not row(framework="fsdp").framework_note


def test_gpu_count_from_note() -> None:
    assert row(n_gpus="", note="one of 128/256/512 GPUs").gpus == 128
    assert layout(n_gpus="", note="128..512 GPUs", fsdp_or_zero="zero3").world_size == 128


@pytest.mark.parametrize("cell", ["nan", "inf", "-1", "abc", "1e400", "1e300", "8,0", "0x10"])
@pytest.mark.parametrize("column", ["n_gpus", "layers", "seq", "tp", "gpu_mem_gib", "hsdp_replicate"])
def test_invalid_number_names_column(column: str, cell: str) -> None:
    with pytest.raises(ConfigError, match=f"{column} = {cell!r} is not a number"):
        row(**{column: cell})


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"heads": "31"}, "heads = 31 does not divide hidden = 4096"),
        ({"hsdp_replicate": "7", "fsdp_or_zero": "hsdp"}, "hsdp_replicate = 7 does not divide 64"),
        ({"layers": "100000"}, "100000 layers"),
        ({"ep": "8"}, "Llama-3.1-8B is a mixture of experts, which is not predicted"),
        ({"model": "Mixtral-8x7B"}, "Mixtral-8x7B is a mixture of experts"),
        ({"model": "Qwen3_30B_a3B"}, "mixture of experts"),
    ],
)
def test_contradictory_cells_are_refused(cells: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        row(**cells)
