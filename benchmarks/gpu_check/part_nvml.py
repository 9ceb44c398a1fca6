"""Costs of NVML: each call, all readings of 8 GPUs, and the sampler. The rehearsal loads the stub of libnvidia-ml."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import measure, nvml_calls
from benchmarks.gpu_check.parts import Figures, run_main
from benchmarks.measure import CannotRun

SAMPLER_S = {"cuda": 10.0, "cpu": 1.0}  # thrice: waiting only, at 1 Hz and at 10 Hz
_STUB = "GPU_CHECK_NVML_STUB"  # set for the child that has the stub on its library path


def measure_calls(options: argparse.Namespace) -> tuple[Figures, Any]:
    """Measure in this process, or in one that loads the stub."""
    if options.device == "cpu" and _STUB not in os.environ:
        return _measure_stub(options)
    result = nvml_calls.measure_first_gpu(rounds=20 if options.device == "cpu" else nvml_calls.ROUNDS)
    costs = result["result"]
    slowest = max(costs["calls"], key=lambda name: costs["calls"][name]["wall_us"]["median"])
    readers = costs[f"readers_of_{nvml_calls.GPUS}_gpus"]
    sampler = _measure_sampler(SAMPLER_S[options.device])
    return {
        "sampler_share_of_a_core": sampler["cpu_s_per_wall_s"],
        "sampler_gpus": float(sampler["gpus"]),
        "sampler_memory_mb": sampler["memory_mb"],
        "readings_share_of_a_core_8_gpus": costs[f"share_of_a_core_for_{nvml_calls.GPUS}_gpus"],
        "fast_readings_8_gpus_wall_us": readers["fast"]["wall_us"]["median"],
        "slow_readings_8_gpus_wall_us": readers["slow"]["wall_us"]["median"],
        "slowest_call": slowest,
        "slowest_call_wall_us": costs["calls"][slowest]["wall_us"]["median"],
        "fields_without_a_value": ", ".join(sorted(costs["without_a_value"])) or "none",
    }, {**result, "sampler": sampler}


def _measure_sampler(seconds: float) -> dict[str, Any]:
    """Run the agent's sampler on this machine's GPUs, in a process of its own; return its cost."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-sampler-") as folder:
        argv = [
            sys.executable,
            "-m",
            "benchmarks.telemetry",
            "--seconds",
            str(seconds),
            "--folder",
            f"{folder}/sampled",
        ]
        done = subprocess.run(argv, cwd=measure.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    cost: dict[str, Any] = json.loads(done.stdout)
    return cost


def _measure_stub(options: argparse.Namespace) -> tuple[Figures, Any]:
    from tests.fakes.nvml import recording
    from tests.fakes.nvml.build import Stub

    try:
        stub = Stub(options.out / "stub")
    except RuntimeError as e:
        raise CannotRun(str(e).splitlines()[0]) from e
    stub.drive(recording.load("h100").text)
    argv = [sys.executable, "-m", "benchmarks.gpu_check.part_nvml", "--device", "cpu", "--out", str(options.out)]
    subprocess.run(argv, env=stub.environ(**{_STUB: "1"}), cwd=measure.ROOT, check=True)
    written = json.loads((options.out / "result.json").read_text())
    return written["figures"], written["details"]


if __name__ == "__main__":
    sys.exit(run_main(measure_calls))
