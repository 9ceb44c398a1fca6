"""What rows do not state: the usual setting, and more frugal ones until a configuration that ran fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clustertrain.plan.layout import Layout
from clustertrain.plan.table import assumptions
from clustertrain.plan.table.assumptions import REASON, STEPS, assume_until_it_fits
from clustertrain.plan.table.predict import complete_row, estimate_row_memory, predict, predict_row
from clustertrain.plan.table.rows import TableRow
from tests.unit.plan.table.test_rows import LLAMA_8B, row

BARE = {name: cell for name, cell in LLAMA_8B.items() if name not in ("act_ckpt", "micro_bs", "global_bs_seqs")}
OLD = {"model": "GPT", "seq": "2048", "gpu": "A100", "precision": "fp16", "tp": "4"}


def step(setting: str, column: str) -> assumptions.Step:
    return next(s for s in STEPS if (s.column, s.setting) == (column, setting))


def apply(setting: str, column: str, parsed: TableRow) -> TableRow | None:
    return step(setting, column).apply(parsed)


def gib(parsed: TableRow) -> float:
    peak = estimate_row_memory(parsed).peak_gib
    assert peak is not None
    return peak


@pytest.mark.parametrize(
    ("column", "setting", "cells"),
    [("fsdp_or_zero", "zero1", OLD), ("gradients", "16 bit", {"tp": "4"}), ("sequence parallelism", "on", OLD),
     ("act_ckpt", "selective_attn", OLD), ("act_ckpt", "selective_op", {}), ("act_ckpt", "full", {}),
     ("loss", "fused", {}), ("weights and moments", "16 bit", {}),
     ("offload", "weights, gradients and optimizer", {})],
)  # fmt: skip
def test_each_step_needs_less_memory(column: str, setting: str, cells: dict[str, str]) -> None:
    parsed = replace(row(**{**cells, "act_ckpt": ""}), activation_checkpointing="none")
    changed = apply(setting, column, parsed)
    assert changed is not None and gib(changed) < gib(parsed)
    assert apply(setting, column, changed) is None or column == "act_ckpt"  # it has the setting now


def test_unstated_memory_of_gpu_is_the_larger_variant() -> None:
    large = apply("the variant with the most memory", "gpu_mem_gib", row(gpu="A100"))
    assert large is not None and (large.gpu.name, large.capacity_gib) == ("a100-80gb", 80)
    for gpu in ("A100-80GB", "H100", "B200"):  # the only one, or another one is slower
        assert apply("the variant with the most memory", "gpu_mem_gib", row(gpu=gpu)) is None


def test_steps_that_do_not_apply() -> None:
    assert apply("on", "sequence parallelism", row(source="Korthikanti", tp="4")) is None  # its framework had none
    assert apply("on", "sequence parallelism", row()) is None
    assert apply("fused", "loss", row(source="torchtitan")) is None
    assert apply("16 bit", "weights and moments", row(source="torchtitan")) is None
    offload = "weights, gradients and optimizer"
    assert apply(offload, "offload", row(source="torchtitan", fsdp_or_zero="fsdp_full")) is None
    assert apply(offload, "offload", row(framework="deepspeed", fsdp_or_zero="zero3")) is not None
    assert apply(offload, "offload", row(fsdp_or_zero="fsdp_full", tp="8")) is None


def test_first_sufficient_step_is_taken() -> None:
    parsed = replace(row(**OLD, act_ckpt=""), activation_checkpointing="none")
    for needed in ("fsdp_or_zero", "sequence parallelism", "act_ckpt"):
        enough, reached = [s.column for s in STEPS].index(needed), False

        def fits(candidate: TableRow, enough: int = enough) -> bool:
            nonlocal reached
            before = [s for s in STEPS[: enough + 1] if s.column not in parsed.stated]
            expected = parsed
            for s in before:
                expected = s.apply(expected) or expected
            reached = candidate == expected
            return reached

        changed, notes = assume_until_it_fits(parsed, fits)
        assert reached and changed != parsed
        assert notes[-1].startswith(f"{needed} is not stated: ") and all(note.endswith(REASON) for note in notes)


def test_row_that_never_fits_takes_all_steps() -> None:
    parsed = row(tp="4", act_ckpt="")
    assert assume_until_it_fits(parsed, lambda _: True) == (parsed, [])
    changed, notes = assume_until_it_fits(parsed, lambda _: False)
    assert (changed.activation_checkpointing, changed.framework.grad_bytes) == ("full", 2) and len(notes) >= 3
    (prediction,) = predict([{**BARE, "n_params_b": "1000", "layers": "", "hidden": "", "n_gpus": "8", "tp": "8"}])
    assert prediction.fits is False and f"act_ckpt is not stated: full, {REASON}" in prediction.note


def test_stated_settings_stay() -> None:
    cells = {
        "tp": "4", "fsdp_or_zero": "ddp", "act_ckpt": "none", "gpu_mem_gib": "40", "framework": "megatron-deepspeed",
        "precision": "fp16 (fp32 grad accumulation)", "gpu": "A100", "note": "no sequence parallel, no offload",
    }  # fmt: skip
    parsed = row(**cells)
    changed, notes = assume_until_it_fits(parsed, lambda _: False)
    assert changed == parsed and notes == []
    assert [s for s in STEPS if s.column not in parsed.stated and s.apply(parsed) is not None] == []


def test_ddp_of_megatron_may_shard_the_optimizer() -> None:
    """Megatron's distributed optimizer works under its DDP, so a table that states DDP leaves it open."""
    for framework, strategy in (("megatron-core", "zero1"), ("nanotron", "ddp")):
        parsed = row(framework=framework, tp="4", fsdp_or_zero="ddp")
        assert parsed.layout.strategy == "ddp"
        assert assume_until_it_fits(parsed, lambda _: False)[0].layout.strategy == strategy
    assert row(framework="nemo", tp="4", fsdp_or_zero="ddp").layout.strategy == "zero1"  # always


def test_prediction_names_assumptions() -> None:
    usual = predict_row({**BARE, "tp": "4"})
    assert usual.fits is True
    assert "framework is not stated: megatron-core, usual for tp 4" in usual.note
    assert "fsdp_or_zero is not stated: zero1, usual for megatron-core" in usual.note
    assert "act_ckpt is not stated: none, the least that fits" in usual.note
    # 22B on eight GPUs of 80 GiB ran, by its table; without the steps it needs more.
    tight = {
        "model": "GPT-22B", "layers": "48", "hidden": "6144", "heads": "64", "vocab": "51200", "seq": "2048",
        "gpu": "A100", "n_gpus": "8", "tp": "8", "micro_bs": "4", "global_bs_seqs": "4", "precision": "fp16",
    }  # fmt: skip
    frugal = predict_row(tight)
    assert (
        frugal.fits is True and f"gpu_mem_gib is not stated: the variant with the most memory, {REASON}" in frugal.note
    )
    assert predict_row({**tight, "gpu_mem_gib": "80", "act_ckpt": "none", "note": "no SP"}).fits is False


def test_zero1_shards_over_data_and_context_ranks() -> None:
    base = {**BARE, "framework": "megatron-core", "micro_bs": "1", "act_ckpt": "none", "n_gpus": "64"}
    optimizer = {
        (dp, cp): estimate_row_memory(complete_row({**base, "dp": str(dp), "cp": str(cp)})).optimizer_gib or 0
        for dp, cp in ((64, 1), (8, 8), (1, 64))
    }
    assert optimizer[8, 8] == optimizer[64, 1] == optimizer[1, 64]


def test_offloaded_zero2_keeps_weights_only() -> None:
    cells = {**LLAMA_8B, "framework": "deepspeed", "fsdp_or_zero": "zero2", "n_gpus": "8"}
    on_gpu, offloaded = (
        estimate_row_memory(complete_row({**cells, "note": note})) for note in ("", "CPU offload of optimizer")
    )
    assert on_gpu.optimizer_gib and offloaded.optimizer_gib == 0 and offloaded.params_gib == on_gpu.params_gib


OUTCOME = {"tokens_per_s_per_gpu": "123", "tflops_per_gpu": "45", "mfu_pct": "6", "peak_mem_gib": "78"}


@pytest.mark.parametrize("cells", [{}, {"tp": "8", "act_ckpt": ""}, {"gpu": "A100", "n_gpus": "8", "act_ckpt": ""}])
def test_outcome_does_not_change_prediction(cells: dict[str, str]) -> None:
    blind = {**LLAMA_8B, **cells}
    predictions = predict([blind, *({**blind, **OUTCOME, "fits": fits} for fits in ("yes", "no", ""))])
    assert predictions == [predictions[0]] * 4


def test_default_layout_without_degrees() -> None:
    assert complete_row({**BARE, "n_gpus": "8", "dp": "8"}).layout == Layout(strategy="fsdp", dp_shard=8)
