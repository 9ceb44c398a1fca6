"""Predictions for the rows of a table: the conventions of their numbers, and notes on invalid rows."""

from __future__ import annotations

import math
import random

import pytest

from clustertrain.errors import ConfigError
from clustertrain.plan.cost.memory import CONTEXT_BYTES, GIB
from clustertrain.plan.cost.model_shape import attention_flops
from clustertrain.plan.table import predict as table
from clustertrain.plan.table.predict import COLUMNS, RowPrediction, estimate_row_memory, predict, predict_row
from clustertrain.plan.table.rows import parse_row
from tests.unit.plan.table.test_rows import LLAMA_8B

TITAN = {**LLAMA_8B, "source": "pytorch/torchtitan benchmarks", "fsdp_or_zero": "fsdp_full", "gpu_mem_gib": "80"}
MEGATRON = {
    "source": "Narayanan et al. SC21", "model": "GPT", "layers": "48", "hidden": "8192", "heads": "64",
    "vocab": "51200", "seq": "2048", "gpu": "A100", "gpu_mem_gib": "80", "n_gpus": "512", "tp": "8", "pp": "4",
    "micro_bs": "1", "global_bs_seqs": "512", "act_ckpt": "full", "precision": "fp16",
}  # fmt: skip


def predict_titan(**cells: str) -> RowPrediction:
    return predict_row({**TITAN, **cells})


def number(value: float | None) -> float:
    assert value is not None
    return value


def test_complete_row_has_numbers_and_no_note() -> None:
    prediction = predict_titan()
    assert prediction.note == "" and prediction.fits is True
    assert number(prediction.tflops_per_gpu) < 989 and number(prediction.peak_mem_gib) < 80
    # FLOPs per token are those of the model: 6 per parameter, and attention.
    flops = 1e12 * number(prediction.tflops_per_gpu) / number(prediction.tokens_per_s_per_gpu)
    assert 6 * 7.5e9 < flops < 6 * 8.03e9 * 1.5


def test_empty_cell_defaults_are_noted() -> None:
    assert predict_titan(act_ckpt="").note == "act_ckpt is not stated: none, the least that fits"
    small_gpu = predict_titan(act_ckpt="", gpu="A100", gpu_mem_gib="40", n_gpus="8")
    assert "act_ckpt is not stated: full" in small_gpu.note
    micro = predict_titan(micro_bs="")
    assert micro.note.startswith("micro_bs is not stated: ") and micro.fits is True
    tokens = [
        number(predict_titan(micro_bs=m).tokens_per_s_per_gpu) for m in ("1", "2") if predict_titan(micro_bs=m).fits
    ]
    assert number(micro.tokens_per_s_per_gpu) >= max(tokens)
    assert predict_titan(n_gpus="").note == "n_gpus is not stated: 8, the fewest on 1, 2, 4 ... nodes on which it fits"
    assert "n_gpus is not stated: 32, one replica" in predict_row({**MEGATRON, "n_gpus": ""}).note


def test_larger_model_needs_more_nodes() -> None:
    large = {**TITAN, "n_params_b": "70.6", "layers": "80", "hidden": "8192", "heads": "64", "ffn": "28672"}
    prediction = predict_row({**large, "n_gpus": ""})
    assert prediction.fits is True and "n_gpus is not stated: 8," not in prediction.note


def flops_per_token(note: str, recompute: str = "full", source: str = "") -> float:
    return table.flops_per_token(parse_row({**TITAN, "act_ckpt": recompute, "source": source, "note": note}), note)


def test_tflops_follow_note() -> None:
    shape = parse_row(TITAN).shape
    model = flops_per_token("")
    scores = attention_flops(shape, 8192, causal=False)
    assert flops_per_token("model FLOPs, causal") == pytest.approx(model - scores / 2)
    assert flops_per_token("model FLOPs, non-causal") == pytest.approx(model)
    assert flops_per_token("TFLOPs are hardware (8N, recompute counted)") == 8 * shape.parameters()
    hardware = flops_per_token("hardware FLOPs")
    assert 1.25 * model < hardware < 4 / 3 * model  # the head is not recomputed
    assert flops_per_token("hardware FLOPs", "none") == model
    assert model < flops_per_token("hardware FLOPs", "selective_attn") < hardware
    # Megatron Bridge's tables count the lower half of the scores.
    assert flops_per_token("", source="Megatron-Bridge") == pytest.approx(model - scores / 2)


def test_memory_follows_note() -> None:
    allocated, reserved, whole = (
        number(predict_titan(note=note).peak_mem_gib) for note in ("max allocated", "max_reserved", "from nvidia-smi")
    )
    assert allocated < reserved < whole
    assert whole == pytest.approx(reserved + CONTEXT_BYTES / GIB)
    estimate = estimate_row_memory(parse_row(TITAN))
    assert allocated == pytest.approx(number(estimate.peak_gib) - number(estimate.overhead_gib))
    assert number(predict_titan().peak_mem_gib) == reserved  # the default
    # Whether it fits depends on the whole device, regardless of the note.
    too_small = f"{whole - 0.01:.3f}"
    assert {predict_titan(note=n, gpu_mem_gib=too_small).fits for n in ("max allocated", "from nvidia-smi")} == {False}
    assert predict_titan(note="max allocated", gpu_mem_gib=f"{whole + 0.01:.3f}").fits is True


def test_recomputation_is_slower_and_smaller() -> None:
    for row in (TITAN, MEGATRON):
        none, full = (predict_row({**row, "act_ckpt": kind}) for kind in ("none", "full"))
        assert number(full.tokens_per_s_per_gpu) < number(none.tokens_per_s_per_gpu)
        assert number(full.peak_mem_gib) < number(none.peak_mem_gib)


def test_compiled_or_fp8_model_is_faster() -> None:
    eager = number(predict_titan().tokens_per_s_per_gpu)
    assert number(predict_titan(compile="yes").tokens_per_s_per_gpu) > eager
    assert number(predict_titan(precision="fp8").tokens_per_s_per_gpu) > eager


def test_cells_match_columns() -> None:
    prediction = predict_titan()
    cells = prediction.cells()
    assert len(cells) == len(COLUMNS) and cells[3] == "yes" and cells[4] == ""
    assert [float(c) for c in cells[:3]] == pytest.approx(
        [prediction.tokens_per_s_per_gpu, prediction.tflops_per_gpu, prediction.peak_mem_gib], rel=1e-3
    )
    assert RowPrediction(note="why").cells() == ("", "", "", "", "why")
    assert RowPrediction(tokens_per_s_per_gpu=12345.6, fits=False).cells() == ("12346", "", "", "no", "")


def test_invalid_row_gets_note() -> None:
    unknown, valid = predict([{**TITAN, "gpu": "X9000"}, TITAN])
    assert unknown.tokens_per_s_per_gpu is None and unknown.fits is None
    assert unknown.note.startswith("not predicted: gpu = 'X9000' is not known; known: ") and "h100" in unknown.note
    assert valid == predict_titan()


GARBAGE = ("nan", "inf", "-inf", "-1", "abc", "1e400", "1e300", "1e9", "1e-5", "0", "0.5", "7", "", " 8 ", "8,0")
NUMBERS = (
    "n_params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "gpu_mem_gib", "n_gpus",
    "gpus_per_node", "dp", "hsdp_replicate", "tp", "pp", "vpp", "cp", "micro_bs", "global_bs_seqs",
)  # fmt: skip
WORDS = {
    "gpu": ("", "H100", "gb200", "X9000", "a100_1g.10gb"),
    "fsdp_or_zero": ("", "zero1", "zero2", "zero3", "hsdp", "hier_zero1", "ddp", "?"),
    "act_ckpt": ("", "none", "selective_op", "selective_layer", "everything"),
    "precision": ("", "FP8", "NVFP4", "int3"),
    "source": ("", "torchtitan", "Megatron-Bridge", "bigscience", "microsoft/DeepSpeed", "QwenLM"),
    "note": ("", "8N", "0x0Gb", "0..0 GPUs", "one of 0/", "CPU offload", "Liger", "allocated"),
    "compile": ("", "yes", "no", "thunder"),
    "framework": ("", "nemo", "fsdp", "Megatron LM", "deepspeed", "x"),
}


@pytest.mark.long
def test_arbitrary_cells_never_raise() -> None:
    rng = random.Random(7)
    refused = 0
    for _ in range(1500):
        row = dict(rng.choice((TITAN, MEGATRON, {"gpu": "A100"})))
        for name in rng.sample(NUMBERS, rng.choice((0, 1, 2, 5))):
            row[name] = rng.choice(GARBAGE)
        for name in rng.sample(sorted(WORDS), rng.choice((0, 1, 3))):
            row[name] = rng.choice(WORDS[name])
        (prediction,) = predict([row])
        cells = prediction.cells()
        if prediction.tokens_per_s_per_gpu is None:
            refused += 1
            assert prediction.note.startswith("not predicted: ") and cells[:4] == ("", "", "", ""), row
        else:
            assert all(0 < float(cell) < math.inf for cell in cells[:3]), (row, cells)
            assert cells[3] in ("yes", "no"), row
    assert 200 < refused < 1300  # both outcomes occurred


def test_missing_cells_equal_empty_cells() -> None:
    """``csv.DictReader`` returns None for the missing cells of a short line."""
    without = {name: cell for name, cell in TITAN.items() if name != "act_ckpt"}
    short: dict[str, str] = {**without, "act_ckpt": None, "note": None}  # type: ignore[dict-item]
    assert list(predict([short])) == list(predict([without])) == [predict_titan(act_ckpt="")]


def test_measured_row_calibrates_its_source() -> None:
    plain = number(predict_titan().tokens_per_s_per_gpu)
    same = {**TITAN, "tokens_per_s_per_gpu": f"{0.8 * plain}"}
    others = [{**same, "seq": "4096", "tokens_per_s_per_gpu": ""}, {**TITAN, "source": "another"}]
    setting, scaled, elsewhere = predict([same, *others], calibrate=True)
    assert setting.tokens_per_s_per_gpu == pytest.approx(0.8 * plain) and setting.note == table.CALIBRATION_NOTE
    uncalibrated = predict(others)
    assert scaled.tokens_per_s_per_gpu == pytest.approx(0.8 * number(uncalibrated[0].tokens_per_s_per_gpu))
    assert elsewhere == uncalibrated[1]
    assert scaled.peak_mem_gib == uncalibrated[0].peak_mem_gib


@pytest.mark.parametrize("cell", ["abc", "nan", "-1", "0", ""])
def test_invalid_measurement_is_not_used(cell: str) -> None:
    bad = {**TITAN, "tokens_per_s_per_gpu": cell}
    unknown = {**TITAN, "gpu": "X9000", "mfu_pct": "40"}
    assert predict([bad, unknown], calibrate=True) == predict([bad, unknown])


def test_row_without_layout_gets_fitting_one() -> None:
    bare = {name: cell for name, cell in TITAN.items() if name not in ("fsdp_or_zero", "micro_bs", "act_ckpt")}
    prediction = predict_row(bare)
    assert prediction.fits is True and "the layout is not stated: fsdp" in prediction.note
    with pytest.raises(ConfigError, match="none of 1 GPUs has room"):
        predict_row({**bare, "n_gpus": "1", "global_bs_seqs": ""})
