"""The parts of ``benchmarks.gpu_check``: the calibration that the planner gets, and a rehearsal of all on the CPU."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks import step_overhead
from benchmarks.gpu_check import evidence, part_layouts, part_mfu, part_planner
from benchmarks.gpu_check.parts import PartFailed
from benchmarks.measure import CannotRun
from clustertrain.config.cluster import ClusterProfile, MeasuredRates
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.plan import planner
from tests.cuda_emulation.layouts import CASES, Case
from tests.paths import ROOT

pytestmark = pytest.mark.long

H100 = MeasuredRates(
    gemm_tflops=700.0, gemm_dtype="bf16", device="NVIDIA H100 80GB HBM3", ranks=1, nodes=1, torch="2.13.0"
)


def test_calibrated_planner_predicts_the_measured_step(tmp_path: Path) -> None:
    """A step twice as long as predicted makes a calibration of 2, with which a profile predicts just that step."""
    setting = step_overhead.CUDA
    predicted_s = part_planner.predict_step_s(setting, "h100", H100)
    assert predicted_s is not None
    row = {"setting": step_overhead.describe(setting), "ours_step_s": {"median": 2 * predicted_s}}
    (tmp_path / "result.json").write_text(json.dumps({"details": row}))
    figures = part_planner._calibrate(H100, tmp_path / "result.json")
    assert figures["calibration"] == pytest.approx(2.0, abs=1e-3)
    recipe = step_overhead.recipe(setting, 1)
    train = msgspec.structs.replace(recipe.train, micro_batch=setting.micro_batch, precision="bf16")
    parallel = msgspec.structs.replace(recipe.parallel, activation_checkpointing="none")
    spec = RunSpec(
        job=JobSpec(backend="local", device="cuda", gpu_type="h100"),
        recipe=msgspec.structs.replace(recipe, train=train, parallel=parallel),
    )
    profile = ClusterProfile(measured=H100, calibration=figures["calibration"])  # type: ignore[arg-type]
    plan = planner.plan(spec, profile, "cuda")
    assert plan.time.step_s == pytest.approx(2 * predicted_s, rel=1e-3)
    assert (plan.layout.activation_checkpointing, plan.batch.micro_batch) == ("none", setting.micro_batch)


def test_slower_products_make_a_longer_step() -> None:
    slow = msgspec.structs.replace(H100, gemm_tflops=350.0)
    fast_s, slow_s = (part_planner.predict_step_s(step_overhead.CUDA, "h100", rates) for rates in (H100, slow))
    assert fast_s is not None and slow_s is not None
    assert slow_s > 1.5 * fast_s


def test_without_a_measured_step_there_are_rates_and_no_calibration(tmp_path: Path) -> None:
    assert part_planner._calibrate(H100, tmp_path / "absent.json")["calibration"] is None
    figures = part_planner._compare_with_catalog(H100)
    assert figures["matmul_share_of_data_sheet"] == pytest.approx(700 / 989, abs=0.01)
    assert figures["planner_matmul_share_of_data_sheet"] == pytest.approx(0.8, abs=0.001)


@pytest.mark.parametrize(("gib", "layers"), [(79.1, 22), (139.8, 22), (39.4, 5), (23.6, 5)])
def test_recipe_fits_the_gpu(monkeypatch: pytest.MonkeyPatch, gib: float, layers: int) -> None:
    properties = type("Properties", (), {"total_memory": gib * 2**30})
    monkeypatch.setattr(part_mfu.torch.cuda, "get_device_properties", lambda index: properties)
    setting = part_mfu.choose_setting("cuda")
    assert setting.model["layers"] == layers
    weights_gib = 2 * 16 * step_overhead.recipe(setting, 1).model.parameters() / 2**30
    assert weights_gib < 0.6 * gib


def test_gpu_too_small_for_the_recipe_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"total_memory": 16 * 2**30})
    monkeypatch.setattr(part_mfu.torch.cuda, "get_device_properties", lambda index: properties)
    with pytest.raises(CannotRun, match="has 16 GiB"):
        part_mfu.choose_setting("cuda")


def test_setting_survives_its_description() -> None:
    described = json.loads(json.dumps(step_overhead.describe(step_overhead.CUDA)))
    assert replace(step_overhead.CPU, **described).model == step_overhead.CUDA.model


@pytest.mark.parametrize(
    ("gpus", "fitting"), [(1, 0), (2, sum(case.layout.world_size == 2 for case in CASES.values())), (4, len(CASES))]
)
def test_layouts_that_need_more_gpus_are_named(monkeypatch: pytest.MonkeyPatch, gpus: int, fitting: int) -> None:
    monkeypatch.setattr(part_layouts.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(part_layouts, "_train", lambda case, device, lane: part_layouts.Outcome(5.0))
    figures, _ = part_layouts.measure_layouts(argparse.Namespace(device="cuda"))
    assert figures["layouts_trained"] == fitting
    skipped = str(figures["skipped_for_lack_of_gpus"])
    assert len([name for name in skipped.split(", ") if name in CASES]) == len(CASES) - fitting


def test_layout_with_another_first_loss_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(case: Case, device: str, lane: list[int]) -> part_layouts.Outcome:
        assert lane in ([0, 1, 2, 3], [4, 5, 6, 7])
        return part_layouts.Outcome(5.2 if case is CASES["hsdp"] else 5.0)

    monkeypatch.setattr(part_layouts.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(part_layouts, "_train", train)
    with pytest.raises(PartFailed, match=r"hsdp: the first loss is 5.2, and 5 with one rank") as failed:
        part_layouts.measure_layouts(argparse.Namespace(device="cuda"))
    assert failed.value.figures["failed"] == "hsdp"


def test_layouts_without_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_layouts.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(part_layouts, "START_S", -1.0)
    figures, _ = part_layouts.measure_layouts(argparse.Namespace(device="cuda"))
    assert figures["layouts_trained"] == 0 and "ddp" in str(figures["no_time_left"]).split(", ")


@pytest.mark.timeout(480)
def test_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    """The parts that no other test runs; `make gpu-check-cpu` runs all."""
    folder = tmp_path / "evidence"
    names = ["nvml", "nccl", "staging", "mfu", "layouts"]
    argv = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--out", str(folder), "--parts", *names]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=460)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = evidence.load(folder)
    assert {p["name"]: p["status"] for p in summary["parts"]} == dict.fromkeys(names, "ok")
    assert summary["seconds"] < summary["limit_s"]
    figures = {p["name"]: p["figures"] for p in summary["parts"]}
    assert figures["nccl"]["two ranks"] == "works"
    assert figures["staging"]["state_gib"] > 0
    assert figures["staging"]["session_host_wait_s"] > 0
    assert (figures["layouts"]["layouts_trained"], figures["layouts"]["failed"]) == (2, "none")
    assert figures["mfu"]["tokens_per_s"] > 0
    assert figures["nvml"]["fields_without_a_value"] == "none"
