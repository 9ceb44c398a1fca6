"""`cluster detect` on a real Slurm: the profile that it writes, and rates measured across two hosts."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.slurm.conftest import TESTBED

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(cluster: Any, tmp_path: Path) -> dict[str, str]:
    """The environment of a user without a profile."""
    without_profile = {k: v for k, v in cluster.env.items() if not k.startswith("CLUSTERTRAIN_CLUSTER")}
    return {**without_profile, "XDG_CONFIG_HOME": str(tmp_path)}


def test_detected_profile_matches_the_handwritten_one(user: dict[str, str], tmp_path: Path) -> None:
    done = runs.call(user, "cluster", "detect")
    path = tmp_path / "clustertrain" / "clusters" / "testbed.toml"
    assert f"{path}: written" in done.stdout
    detected = tomllib.loads(path.read_text())
    by_hand = tomllib.loads((TESTBED.parent / "profiles" / "testbed.toml").read_text())
    # The handwritten device is cpu, because the testbed's GPUs are fake. Slurm does not know that.
    same = ("partition", "gpu_type", "grace_s")
    assert {k: detected[k] for k in same} == {k: by_hand[k] for k in same}
    assert (detected["gpus_per_node"], detected["gpus_flag"], detected["cpus_per_gpu"]) == (8, "gpus-per-node", 2)
    (listed,) = json.loads(runs.call(user, "cluster", "list", "--json").stdout)["profiles"]
    assert listed == {"name": "testbed", "path": str(path), "default": False}


def test_rates_are_measured_across_nodes_of_allocation(
    cluster: Any, user: dict[str, str], submit: Callable[..., str], tmp_path: Path
) -> None:
    profile = tmp_path / "clustertrain" / "clusters" / "here.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text('device = "cpu"  # the GPUs are fake\n')
    out = tmp_path / "out.json"
    export = f"export XDG_CONFIG_HOME={tmp_path}"
    detect = f"{sys.executable} -m clustertrain cluster detect here --json >{out}.part && mv {out}.part {out}"
    # --overlap: like in an interactive shell, which is itself a step and holds the GPUs.
    script = f"{export}\nsrun -N1 -n1 --overlap bash -c '{detect}'"
    job = submit(script, "-N2", "--gpus-per-node=h100:2", "-c2", "-p", "low", f"--output={tmp_path}/job.log")
    cluster.wait_for(lambda: cluster.job_states(job)[-1:] not in ([], ["PENDING"], ["RUNNING"]), 180, "the job's end")
    assert out.exists(), (tmp_path / "job.log").read_text()
    result = json.loads(out.read_text())
    measured = result["measured"]
    assert result["failures"] == [] and (measured["nodes"], measured["ranks"], measured["device"]) == (2, 2, "cpu")
    assert min(measured[k] for k in ("gemm_tflops", "node_bus_gb_s", "fabric_bus_gb_s")) > 0
    written = tomllib.loads(profile.read_text())
    assert "eth0" in {interface["name"] for interface in written["node"]["interfaces"]}
    assert written["measured"]["fabric_bus_gb_s"] == measured["fabric_bus_gb_s"]
    assert written["device"] == "cpu" and result["conflicts"] == {"device": {"profile": "cpu", "detected": "cuda"}}
