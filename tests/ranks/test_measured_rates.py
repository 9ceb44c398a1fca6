"""Rates measured with real ranks, on CPU with gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from clustertrain import clock
from clustertrain.cluster import bench
from clustertrain.cluster.bench import OUTPUT_PREFIX, BenchTarget
from clustertrain.scheduler.sockets import find_free_port
from tests.runs import INTERRUPTIBLE

pytestmark = pytest.mark.ranks


def test_rates_of_this_machine() -> None:
    progress: list[str] = []
    result = bench.measure(BenchTarget(python=sys.executable, device="cpu"), progress.append)
    assert result.failures == () and result.measured is not None
    rates = result.measured
    assert (rates.device, rates.ranks, rates.nodes, rates.gemm_dtype, rates.torch) == (
        "cpu",
        2,
        1,
        "fp32",
        torch.__version__,
    )
    assert rates.gemm_tflops is not None and rates.gemm_tflops > 0
    assert rates.node_bus_gb_s is not None and rates.node_bus_gb_s > 0
    assert rates.fabric_bus_gb_s is None
    assert len(progress) == 3
    assert result.node is not None and result.node.cpus.threads


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_missing_gpu_is_not_measured_on_cpu() -> None:
    result = bench.measure(BenchTarget(python=sys.executable, device="cuda"), lambda _: None)
    assert result.measured is None
    assert result.failures == (
        "measuring matrix products: RuntimeError: CUDA was requested, but torch finds no usable GPU",
    )


def test_two_nodes_measure_and_one_reports() -> None:
    """Start the process of each node as srun would, both on this machine."""
    argv = [sys.executable, "-m", "clustertrain.cluster.bench_node", "--ranks", "1", "--nodes", "localhost,127.0.0.1"]
    argv += ["--port", str(find_free_port()), "all-reduce-across", "--device", "cpu"]
    steps = [
        subprocess.Popen(argv, env={**os.environ, "SLURM_NODEID": str(n)}, stdout=subprocess.PIPE, text=True)
        for n in (0, 1)
    ]
    try:
        outputs = [step.communicate(timeout=90)[0] for step in steps]
    finally:
        for step in steps:
            step.terminate()
            step.wait(30)
    assert [step.returncode for step in steps] == [0, 0]
    (line,) = [line for text in outputs for line in text.splitlines() if line.startswith(OUTPUT_PREFIX)]
    report: dict[str, Any] = json.loads(line.removeprefix(OUTPUT_PREFIX))
    assert report["ranks"] == 2 and report["bus_gb_s"] > 0


def test_interrupt_ends_all_processes_and_writes_nothing(tmp_path: Path) -> None:
    argv = [*INTERRUPTIBLE, sys.executable, "-m", "clustertrain", "cluster", "detect", "x", "--local", "--measure"]
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        descendants: list[psutil.Process] = []

        def ranks_run() -> bool:
            descendants[:] = psutil.Process(child.pid).children(recursive=True)
            # The step, torchrun and its two ranks.
            return len(descendants) >= 4

        assert clock.wait_until(ranks_run, 90.0)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in stderr
    assert psutil.wait_procs(descendants, timeout=10)[1] == []
    assert list(tmp_path.iterdir()) == []
