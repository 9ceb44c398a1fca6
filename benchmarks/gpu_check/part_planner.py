"""Rates of this machine as ``cluster detect`` measures them, and the step that the planner predicts with them.

The ratio of the measured step to the predicted one is the profile's ``calibration``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import step_overhead
from benchmarks.gpu_check.parts import Figures, run_main
from clustertrain.cluster import bench
from clustertrain.cluster.bench import BenchTarget
from clustertrain.config import hardware
from clustertrain.config.cluster import ClusterProfile, MeasuredRates
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.plan import planner
from clustertrain.plan.cost import compute


def measure_rates(options: argparse.Namespace) -> tuple[Figures, Any]:
    """Measure the rates; predict the step of the part ``mfu`` if that part has a result."""
    target = BenchTarget(python=sys.executable, device=options.device)
    result = bench.measure(target, lambda text: print(text, flush=True))
    measured = result.measured
    if measured is None:
        raise RuntimeError("; ".join(result.failures) or "nothing was measured")
    figures: dict[str, float | str | None] = {
        "matmul_tflops": measured.gemm_tflops,
        "matmul_dtype": measured.gemm_dtype,
        "node_bus_gb_s": measured.node_bus_gb_s,
        "failures": "; ".join(result.failures) or "none",
        **_compare_with_catalog(measured),
        **_calibrate(measured, Path(options.mfu) if options.mfu else None),
    }
    return figures, {"measured": msgspec.to_builtins(measured), "notes": result.notes, "failures": result.failures}


def _compare_with_catalog(measured: MeasuredRates) -> Figures:
    """Return the measured share of the data sheet's rate, and the planner's, whose rest is what training sustains."""
    gpu = hardware.find_gpu_type(measured.device)
    if gpu is None or not measured.gemm_tflops or measured.gemm_dtype == "fp32":
        return {"gpu_type": gpu.name if gpu else None}
    sustained = compute.FITTED_CONSTANTS.sustained[compute.gpu_generation(gpu)]
    achievable = compute.build_rates(gpu, "bf16").half / sustained / gpu.tflops / 1e12
    return {
        "gpu_type": gpu.name,
        "matmul_share_of_data_sheet": round(measured.gemm_tflops / gpu.tflops, 4),
        "planner_matmul_share_of_data_sheet": round(achievable, 4),
    }


def _calibrate(measured: MeasuredRates, mfu: Path | None) -> Figures:
    gpu = hardware.find_gpu_type(measured.device)
    try:
        details = json.loads(mfu.read_text())["details"] if mfu else None
    except (OSError, ValueError, KeyError):
        details = None
    if details is None or gpu is None:
        return {"predicted_step_s": None, "calibration": None}
    predicted_s = predict_step_s(replace(step_overhead.CUDA, **details["setting"]), gpu.name, measured)
    measured_s = details["ours_step_s"]["median"]
    if predicted_s is None:
        return {"predicted_step_s": f"none for {gpu.name}", "measured_step_s": measured_s, "calibration": None}
    return {
        "predicted_step_s": round(predicted_s, 5),
        "measured_step_s": measured_s,
        "calibration": round(measured_s / predicted_s, 4),
    }


def predict_step_s(setting: step_overhead.Setting, gpu_type: str, measured: MeasuredRates | None) -> float | None:
    """Return the planned seconds of a step of ``setting`` on one GPU, by the measured rates if there are any."""
    recipe = step_overhead.recipe(setting, 1)
    train = msgspec.structs.replace(recipe.train, micro_batch=setting.micro_batch, precision=setting.precision)
    parallel = msgspec.structs.replace(recipe.parallel, activation_checkpointing="none")
    spec = RunSpec(
        job=JobSpec(backend="local", device="cuda", gpu_type=gpu_type),
        recipe=msgspec.structs.replace(recipe, train=train, parallel=parallel),
    )
    return planner.plan(spec, ClusterProfile(measured=measured), "cuda").time.step_s


if __name__ == "__main__":
    sys.exit(run_main(measure_rates, "--mfu"))
