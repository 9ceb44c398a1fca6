"""This machine's GPUs, with the stand-in for the driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fakes.nvml.build import Stub


def detect(stub: Stub, folder: Path, **env: str) -> dict[str, Any]:
    """``cluster detect`` in a process of its own, which loads the stub."""
    argv = [sys.executable, "-m", "clustertrain", "cluster", "detect", "here", "--local", "--dry-run", "--json"]
    environ = stub.environ(XDG_CONFIG_HOME=str(folder), **env)
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_gpus_of_a_known_type(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive("".join(f"device {i} name NVIDIA H100 80GB HBM3\n" for i in range(4)))
    seen = detect(nvml_stub, tmp_path)
    assert (seen["profile"]["device"], seen["profile"]["gpus_per_node"]) == ("cuda", 4)
    assert seen["found"]["gpu_type"] == {"value": "h100", "source": "NVML calls it NVIDIA H100 80GB HBM3"}


def test_slices_are_not_gpus_and_an_unknown_type_is_said(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive("device 0 name NVIDIA X9\ndevice 1 name NVIDIA X9\ndevice 2 parent 0\n")
    seen = detect(nvml_stub, tmp_path)
    assert seen["profile"]["gpus_per_node"] == 2 and "gpu_type" not in seen["found"]
    assert any("'NVIDIA X9' is not in the catalogue" in note for note in seen["notes"])


def test_a_driver_without_gpus(nvml_stub: Stub, tmp_path: Path) -> None:
    seen = detect(nvml_stub, tmp_path, NVML_STUB_DEVICES="0")
    assert (seen["profile"]["device"], seen["profile"]["gpus_per_node"]) == ("cpu", 0)
