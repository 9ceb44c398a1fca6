"""Detection of this machine's GPUs with the NVML stub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml.build import Stub


def detect(stub: Stub, folder: Path, **env: str) -> dict[str, Any]:
    """Run ``cluster detect`` in a child process that loads the stub."""
    argv = [sys.executable, "-m", "clustertrain", "cluster", "detect", "here", "--local", "--dry-run", "--json"]
    environ = stub.environ(XDG_CONFIG_HOME=str(folder), **env)
    result = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True, timeout=60)
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_known_gpu_type(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive("".join(f"device {i} name NVIDIA H100 80GB HBM3\n" for i in range(4)))
    document = detect(nvml_stub, tmp_path)
    assert (document["profile"]["device"], document["profile"]["gpus_per_node"]) == ("cuda", 4)
    assert document["detected"]["gpu_type"] == {"value": "h100", "source": "NVML name: NVIDIA H100 80GB HBM3"}


@pytest.mark.long
def test_mig_slices_are_skipped_and_unknown_type_is_noted(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive("device 0 name NVIDIA X9\ndevice 1 name NVIDIA X9\ndevice 2 parent 0\n")
    document = detect(nvml_stub, tmp_path)
    assert document["profile"]["gpus_per_node"] == 2 and "gpu_type" not in document["detected"]
    assert any("'NVIDIA X9' is not in the GPU catalog" in note for note in document["notes"])


@pytest.mark.long
def test_driver_without_gpus(nvml_stub: Stub, tmp_path: Path) -> None:
    document = detect(nvml_stub, tmp_path, NVML_STUB_DEVICES="0")
    assert (document["profile"]["device"], document["profile"]["gpus_per_node"]) == ("cpu", 0)
