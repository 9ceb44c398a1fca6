"""Regressions: plans that could not run, or that reported something other than what the trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain.cli.plan import write_predictions
from clustertrain.config import hardware
from clustertrain.config.cluster import ClusterProfile, MeasuredRates
from clustertrain.config.data import DataSpec
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.parsing.presets import PRESETS
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import TrainSpec
from clustertrain.errors import ConfigError
from clustertrain.plan import pipeline_schedules
from clustertrain.plan.cost.hardware_rates import build_machine
from clustertrain.plan.planner import Plan, plan
from clustertrain.plan.search.layouts import search
from clustertrain.plan.table.predict import predict, predict_row
from tests.unit.plan.problems import LLAMA_8B, problem

pytestmark = pytest.mark.long


def make_plan(
    preset: str,
    gpu: str,
    *,
    batch: int = 256,
    seq_len: int = 8192,
    precision: Any = "auto",
    profile: ClusterProfile | None = None,
    parallel: dict[str, Any] | None = None,
    **job: Any,
) -> Plan:
    recipe = Recipe(
        model=ModelSpec(**PRESETS[preset]),
        data=DataSpec(seq_len=seq_len),
        train=TrainSpec(global_batch=batch, precision=precision),
        parallel=ParallelSpec(**(parallel or {})),
    )
    spec = RunSpec(job=JobSpec(**{"nodes": 4, "gpus": 8, "gpu_type": gpu, **job}), recipe=recipe)
    return plan(spec, profile or ClusterProfile(), "cuda")


def test_search_never_splits_fp8_layers() -> None:
    result = make_plan("llama3.1-70b", "h100", nodes=16, precision="fp8")
    assert result.layout.tp == 1
    assert any(r.strategy == "tensor parallel" and "8-bit" in r.reason for r in result.rejected)


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
@pytest.mark.parametrize(
    "option", [{"activation_checkpointing": "selective"}, {"compile": True}], ids=["selective", "compile"]
)
def test_schedule_conflict_excludes_pipelines(schedule: str, option: Any) -> None:
    result = make_plan("llama3.1-8b", "h100", parallel={"schedule": schedule, **option})
    assert result.layout.pp == 1 and result.memory.fits is True
    with pytest.raises(ConfigError):
        make_plan("llama3.1-8b", "h100", parallel={"schedule": schedule, **option}, pp=4)


def test_requested_schedule_has_no_more_stages_than_parts() -> None:
    for nodes, gpus in ((256, 8), (2, 8)):
        parallel = {"schedule": "zero-bubble"}
        result = make_plan("llama3.1-8b", "l40s", batch=8, seq_len=1024, nodes=nodes, gpus=gpus, parallel=parallel)
        assert pipeline_schedules.num_stages(result.layout) <= 32 + 2


def test_pipeline_always_defers_reduction() -> None:
    for limit in (20.0, 40.0, 64.0):
        outcome = search(problem(LLAMA_8B, world=32, seq_len=2048, global_batch=64, limit_gib=limit))
        assert all(c.layout.defer_reduction for c in outcome.fitting if c.layout.pp > 1)


def test_requested_shard_group_is_searched() -> None:
    result = make_plan("llama3.1-8b", "h100", batch=48, nodes=6, layout="hybrid-shard", dp_shard=3)
    assert (result.layout.dp_replicate, result.layout.dp_shard) == (16, 3)
    assert result.time.step_s is not None


def test_zero1_communicates_at_least_as_much_as_ddp() -> None:
    """ZeRO-1 adds the exchange of parameters to DDP's all-reduce."""
    ddp, zero1 = (make_plan("llama3.2-1b", "a100-80gb", seq_len=2048, layout=kind) for kind in ("ddp", "zero1"))
    assert ddp.time.comm_s is not None and zero1.time.comm_s is not None
    assert zero1.time.comm_s["data"] > ddp.time.comm_s["data"]


def test_measured_matmul_rate_applies_to_16_bit() -> None:
    profile = ClusterProfile(
        measured=MeasuredRates(gemm_tflops=271.0, gemm_dtype="bf16", device="NVIDIA A100-SXM4-80GB")
    )
    gpu = hardware.find_gpu_type("a100-80gb")
    assert gpu is not None
    assert build_machine(gpu, 8, "fp32", profile).rates.matmul < 20e12
    assert build_machine(gpu, 8, "bf16", profile).rates.matmul == pytest.approx(271e12 * 0.85)


def test_calibration_scales_whole_step() -> None:
    from_catalog, slower = (
        make_plan("llama3.1-8b", "h100", layout="fsdp", profile=ClusterProfile(calibration=c)) for c in (1.0, 1.5)
    )
    assert from_catalog.time.step_s is not None and slower.time.step_s == pytest.approx(1.5 * from_catalog.time.step_s)


def test_profile_gpu_type_is_predicted() -> None:
    gpu_type = hardware.GpuType(
        name="x9000", memory_gib=80, tflops=500, memory_gb_s=2000, link_gb_s=200, fabric_gb_s=25
    )
    result = make_plan("llama3.1-8b", "x9000", profile=ClusterProfile(gpu=gpu_type))
    assert result.memory.capacity_gib == 80 and result.time.mfu is not None and 0.1 < result.time.mfu < 0.8


def test_profile_gpu_type_needs_rates() -> None:
    with pytest.raises(ValueError, match=r"gpu\.tflops = 0"):
        ClusterProfile(gpu=hardware.GpuType(name="x9000", memory_gib=80))
    gpu_type = hardware.GpuType(name="x9000", memory_gib=80, tflops=500, memory_gb_s=2000)
    assert make_plan("llama3.2-1b", "x9000", precision="fp32", profile=ClusterProfile(gpu=gpu_type)).time.step_s


@pytest.mark.parametrize(
    ("output", "message"), [("none/out.csv", "cannot be written"), ("folder", "not a regular file")]
)
def test_unwritable_predictions_path_is_an_error(tmp_path: Path, output: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "in.csv").write_text("gpu,seq,n_gpus,n_params_b\nH100,2048,8,8\n")
    with pytest.raises(ConfigError, match=message):
        write_predictions(tmp_path / "in.csv", tmp_path / output, calibrate=False, as_json=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "in.csv"]


def test_named_fabric_slows_cross_node_traffic() -> None:
    slow, fast = (
        make_plan("llama3.1-8b", "h100", layout="fsdp", profile=ClusterProfile(fabric=fabric))
        for fabric in ("ethernet-10", "8 x ndr")
    )
    assert (slow.time.step_s or 0) > (fast.time.step_s or 0)
    with pytest.raises(ConfigError, match="fabric = '8 x ndx'"):
        ClusterProfile(fabric="8 x ndx")


def test_pcie_card_has_no_nvlink() -> None:
    for name in ("NVIDIA A100 80GB PCIe", "NVIDIA H100 PCIe", "Tesla V100-PCIE-16GB"):
        gpu = hardware.find_gpu_type(name)
        assert gpu is not None and gpu.link_gb_s == 0, name
    assert hardware.find_gpu_type("NVIDIA A30 PCIe") is hardware.find_gpu_type("a30")


def test_offload_suggestion_respects_host_memory() -> None:
    suggestion = make_plan("llama3.1-405b", "h100", batch=64, nodes=1).suggested_changes
    assert suggestion and "offload" not in suggestion


ROW = {"model": "Llama-3-8B", "n_params_b": "8.03", "gpu": "H100", "n_gpus": "16", "seq": "4096", "micro_bs": "1"}


def test_single_stated_degree_states_layout() -> None:
    for cells in ({"pp": "8"}, {"cp": "8"}, {"dp": "16"}, {"tp": "2"}):
        assert "layout is not stated" not in predict_row({**ROW, **cells}).note
    assert "the layout is not stated" in predict_row(ROW).note


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"tp": "32"}, "tp 32"),
        ({"tp": "3"}, "does not divide n_gpus = 16"),
        ({"fsdp_or_zero": "magic"}, "fsdp_or_zero = 'magic'"),
        ({"act_ckpt": "sometimes"}, "act_ckpt = 'sometimes'"),
    ],
)
def test_contradictory_row_gets_note(cells: dict[str, str], message: str) -> None:
    (prediction,) = predict([{**ROW, **cells}], calibrate=True)
    assert prediction.tokens_per_s_per_gpu is None and message in prediction.note


def test_hardware_flops_need_a_note() -> None:
    row = {**ROW, "tp": "1", "act_ckpt": "full"}
    plain, modern, counted = (
        predict_row({**row, "note": note}).tflops_per_gpu or 0
        for note in ("", "trained on modern hardware", "TFLOPs are hardware")
    )
    assert plain == modern < counted
