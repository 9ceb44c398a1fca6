"""`cluster detect` on the real Slurm: what it says of the site, and rates measured across two of its hosts."""

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
    kept = {k: v for k, v in cluster.env.items() if not k.startswith("CLUSTERTRAIN_CLUSTER")}
    return {**kept, "XDG_CONFIG_HOME": str(tmp_path)}


def test_site_profile_as_written_by_its_authors(user: dict[str, str], tmp_path: Path) -> None:
    done = runs.call(user, "cluster", "detect")
    path = tmp_path / "clustertrain" / "clusters" / "testbed.toml"
    assert f"{path}: written" in done.stdout
    found = tomllib.loads(path.read_text())
    by_hand = tomllib.loads((TESTBED.parent / "profiles" / "testbed.toml").read_text())
    # Its device is cpu, since the testbed's GPUs are stand-ins, and Slurm does not know that.
    same = ("partition", "gpu_type", "grace_s")
    assert {k: found[k] for k in same} == {k: by_hand[k] for k in same}
    assert (found["gpus_per_node"], found["gpus_flag"], found["cpus_per_gpu"]) == (8, "gpus-per-node", 2)
    (listed,) = json.loads(runs.call(user, "cluster", "list", "--json").stdout)
    assert listed == {"name": "testbed", "path": str(path), "default": False}


def test_rates_are_measured_across_nodes_of_allocation(
    cluster: Any, user: dict[str, str], submit: Callable[..., str], tmp_path: Path
) -> None:
    profile = tmp_path / "clustertrain" / "clusters" / "here.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text('device = "cpu"  # the GPUs are stand-ins\n')
    out = tmp_path / "out.json"
    export = f"export XDG_CONFIG_HOME={tmp_path}"
    detect = f"{sys.executable} -m clustertrain cluster detect here --json >{out}.part && mv {out}.part {out}"
    # --overlap: as typed in a shell that is itself a step and holds the GPUs.
    script = f"{export}\nsrun -N1 -n1 --overlap bash -c '{detect}'"
    job = submit(script, "-N2", "--gpus-per-node=h100:2", "-c2", "-p", "low", f"--output={tmp_path}/job.log")
    cluster.wait_for(lambda: cluster.job_states(job)[-1:] not in ([], ["PENDING"], ["RUNNING"]), 180, "the job's end")
    assert out.exists(), (tmp_path / "job.log").read_text()
    seen = json.loads(out.read_text())
    measured = seen["measured"]
    assert seen["failures"] == [] and (measured["nodes"], measured["ranks"], measured["device"]) == (2, 2, "cpu")
    assert min(measured[k] for k in ("gemm_tflops", "node_bus_gb_s", "fabric_bus_gb_s")) > 0
    written = tomllib.loads(profile.read_text())
    assert "eth0" in {interface["name"] for interface in written["node"]["interfaces"]}
    assert written["measured"]["fabric_bus_gb_s"] == measured["fabric_bus_gb_s"]
    assert written["device"] == "cpu" and seen["conflicts"] == {"device": {"profile": "cpu", "detected": "cuda"}}
