"""Settings that an agent derives from its node. The real reader reads a fixture's files and the NVML stub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertrain.agent.node_environment import NodeJob, inspect_node
from tests.fakes.nvml.build import Stub
from tests.fakes.nvml.fixture import nvml_library, nvml_stub  # noqa: F401
from tests.fixtures.nodes.expand import expand

PROGRAM = """
import json, os, sys
from pathlib import Path
import msgspec
from clustertrain.agent.node_environment import NodeJob, inspect_node
job = NodeJob("cuda", int(sys.argv[2]), True, sys.argv[3], Path("/logs/flight-record-rank-"))
print(json.dumps(msgspec.to_builtins(inspect_node(job, os.environ, Path(sys.argv[1])))))
"""


def inspect(root: Path, env: dict[str, str], ranks: int, peer: str = "") -> dict[str, Any]:
    argv = [sys.executable, "-W", "error", "-c", PROGRAM, str(root), str(ranks), peer]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60)
    node_settings: dict[str, Any] = json.loads(done.stdout)
    return node_settings


def fake_ip(folder: Path, address: str, route: str) -> dict[str, str]:
    """Return a PATH whose ``ip`` prints what the fixture's node would."""
    folder.mkdir()
    (folder / "address").write_text(address)
    (folder / "route").write_text(route)
    program = folder / "ip"
    program.write_text(f'#!/bin/sh\ncat "{folder}/$2"\n')
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.long
def test_settings_come_from_the_node_unless_already_set(nvml_stub: Stub, tmp_path: Path) -> None:  # noqa: F811
    node = expand("hgx-h200-roce", tmp_path / "node")
    nvml_stub.drive("device 0 uuid GPU-a\ndevice 0 bus 1b\ndevice 0 nvlinks 18\ndevice 0 nvlinks_active 17\n")
    env = nvml_stub.environ(**fake_ip(tmp_path / "bin", *node.ip), NCCL_IB_HCA="mlx5_0", NCCL_DEBUG="WARN")
    node_settings = inspect(node.root, env, 1, peer="eno1")
    assert {name: s["value"] for name, s in node_settings["settings"].items()} == {
        "GLOO_SOCKET_IFNAME": "ens3f0np0",
        "NCCL_SOCKET_IFNAME": "=ens3f0np0",
        "TORCH_FR_DUMP_TEMP_FILE": "/logs/flight-record-rank-",
    }
    assert "GPU 0: 17 of 18 NVLinks are up" in node_settings["notes"]


@pytest.mark.long
def test_ranks_are_bound_near_their_gpus(nvml_stub: Stub, tmp_path: Path) -> None:  # noqa: F811
    node = expand("p5", tmp_path / "node")
    first, *rest = sorted(os.sched_getaffinity(0))
    # Distribute this machine's processors over the fixture's two NUMA nodes.
    for name, cpus in (("node0", [first]), ("node1", rest or [first])):
        numbers = ",".join(map(str, cpus))
        (node.root / f"sys/devices/system/node/{name}/cpulist").write_text(numbers)
    nvml_stub.drive("device 0 uuid GPU-a\ndevice 0 bus ca\ndevice 1 uuid GPU-b\ndevice 1 bus 53\n")
    env = nvml_stub.environ(**fake_ip(tmp_path / "bin", *node.ip))
    node_settings = inspect(node.root, env, 2)
    if len(rest) == 1:
        assert node_settings["settings"]["CLUSTERTRAIN_RANK_CPUS"]["value"] == f"{rest[0]};{first}"
    else:  # one processor, or so many that the NUMA node with one of them has less than its share
        assert any("ranks not bound" in note for note in node_settings["notes"])
    bound = inspect(node.root, {**env, "OMP_PROC_BIND": "close"}, 2)
    assert "CLUSTERTRAIN_RANK_CPUS" not in bound["settings"]


def test_missing_driver_and_files_become_notes(nvml_stub: Stub, tmp_path: Path) -> None:  # noqa: F811
    nvml_stub.drive("fail * nvmlInitWithFlags 9")
    node_settings = inspect(tmp_path, nvml_stub.environ(PATH=str(tmp_path)), 8)
    assert set(node_settings["settings"]) == {"TORCH_FR_DUMP_TEMP_FILE"}
    assert node_settings["notes"][0] == "no GPUs read: DRIVER_NOT_LOADED: the NVIDIA driver is not loaded"
    assert any("ip: command not found" in note for note in node_settings["notes"])


def test_any_error_becomes_a_note() -> None:
    broken: Any = 7  # not a path
    node_settings = inspect_node(NodeJob("cpu", 1, True, "", Path("/logs")), {}, broken)
    assert node_settings.settings == {}
    assert "the node was not read: " in node_settings.notes[0]
