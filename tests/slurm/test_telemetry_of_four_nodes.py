"""A real job on four nodes whose fake GPUs follow a recorded load: one idles, one throttles, one is slow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.runs import Run

pytestmark = pytest.mark.slurm
IDLE, THROTTLED, SLOW = ("node02", 1), ("node03", 0), ("node04", 1)

# Eight seconds of steps that compute and wait briefly, in a loop. The values are those of a working H100.
HEALTHY = """
at {i} utilization 0 97
ramp {i} utilization 4 {least}
ramp {i} utilization 8 97
at {i} memory_busy 0 55
at {i} memory_used 0 64424509440
at {i} power 0 640000
ramp {i} power 4 610000
ramp {i} power 8 640000
at {i} temperature 0 61
at {i} sm_clock 0 1980
at {i} sm_activity 0 88
at {i} tensor_activity 0 41
at {i} dram_activity 0 36
at {i} processes 0 1
at {i} nvlinks 0 18
at {i} pcie_rx_rate 0 900000000
at {i} nvlink_tx_rate 0 40000000000
"""
UNUSED = """
at {i} nvlinks 0 18
at {i} memory_used 0 536870912
at {i} power 0 72000
at {i} temperature 0 31
at {i} sm_clock 0 345
"""
# Heat lowers the clock: SwThermalSlowdown and HwThermalSlowdown of nvmlClocksEventReasons.
HOT = """
at {i} temperature 0 91
at {i} reasons 0 96
at {i} sm_clock 0 1290
at {i} power 0 410000
"""
# A low clock without a reason.
LOW_CLOCK = """
at {i} sm_clock 0 1395
at {i} power 0 430000
"""


def gpu_load(node: str) -> str:
    lines = ["loop 8"]
    for i in (0, 1):
        load = {IDLE: UNUSED, THROTTLED: HEALTHY + HOT, SLOW: HEALTHY + LOW_CLOCK}.get((node, i), HEALTHY)
        lines += [f"device {i} gpm 1", load.format(i=i, least=90 + i)]
    return "\n".join(lines)


@pytest.fixture
def env_with_loads(env: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which the GPUs of each node follow the node's own file."""
    for n in (1, 2, 3, 4):
        (tmp_path / f"gpus-node0{n}.txt").write_text(gpu_load(f"node0{n}"))
    original = dict(env)
    env["NVML_STUB_FILE"] = str(tmp_path / "gpus-%h.txt")
    yield env
    env.clear()
    env.update(original)


def test_report_names_the_three_faults_only(
    env_with_loads: dict[str, str], submit_run: Callable[..., Run], tmp_path: Path
) -> None:
    recipe = runs.write_recipe(tmp_path, steps=300, paced=False, more="\n[telemetry]\nflush_s = 2\n")
    run = submit_run("--nodes", "4", "--gpus", "2", "--layout", "ddp", str(recipe))
    run.complete()
    report: dict[str, Any] = json.loads(run.call("telemetry", run.id, "--json").stdout)
    gpus = {(g["node"], g["index"]): g for g in report["gpus"]}
    assert len(gpus) == 8
    findings = [n for n in report["insights"] if n["severity"] != "info"]
    assert {(n["node"], n["uuid"], n["rank"]) for n in findings if n["uuid"]} == {
        (node, gpus[node, i]["uuid"], gpus[node, i]["ranks"][0]) for node, i in (IDLE, THROTTLED, SLOW)
    }
    assert sorted(n["code"] for n in findings) == ["gpu_unused", "slow_gpu", "throttled"], findings
    assert report["coverage"] > 0.8
    assert {g["ranks"][0] for g in report["gpus"]} == set(range(8))
    assert all("train" in g["phases"] for g in report["gpus"])
    assert report["training"]["steps"] == 300
