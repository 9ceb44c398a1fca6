"""GPU topology through the real nvidia-ml-py, in a child process that loads the stub."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.fakes.nvml import recording
from tests.fakes.nvml.build import Stub

PROGRAM = """
import json, os
import msgspec
from clustertrain.telemetry.readers.nvml import NvmlError
from clustertrain.telemetry.readers.topology import read_gpus
try:
    print(json.dumps(msgspec.to_builtins(read_gpus(os.environ))))
except NvmlError as e:
    print(json.dumps(e.reason))
"""


def read_topology(env: dict[str, str]) -> Any:
    argv = [sys.executable, "-W", "error", "-c", PROGRAM]
    result = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(result.stdout)


def test_links_and_addresses_in_rank_order(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        device 0 uuid GPU-a
        device 0 bus 1b
        device 0 nvlinks 18
        device 0 nvswitch 1
        device 1 uuid GPU-b
        device 1 bus c3
        device 1 nvlinks 18
        device 1 nvlinks_active 16
    """)
    gpus = read_topology(nvml_stub.environ(CUDA_VISIBLE_DEVICES="GPU-b,GPU-a"))
    name = "NVIDIA H100 80GB HBM3 (stub)"
    assert gpus == [
        {"index": 1, "name": name, "pci_address": "0000:c3:00.0", "nvlinks_active": 16, "nvlinks_total": 18}
        | {"nvswitch": False},
        {"index": 0, "name": name, "pci_address": "0000:1b:00.0", "nvlinks_active": 18, "nvlinks_total": 18}
        | {"nvswitch": True},
    ]


@pytest.mark.long
@pytest.mark.parametrize("missing", [(), ("nvmlDeviceGetGpuFabricInfoV",), ("nvmlDeviceGetGpuFabricInfo",)])
def test_multi_node_nvlink_domain(nvml_stub: Stub, missing: tuple[str, ...]) -> None:
    """Drivers before 550 have only the older call, and CUDA 14 has only the newer one."""
    nvml_stub.remove_functions(missing)
    nvml_stub.drive("""
        device 0 uuid GPU-a
        device 0 nvlinks 18
        device 0 nvswitch 1
        device 0 cluster 7
        device 0 clique 4
    """)
    (gpu,) = read_topology(nvml_stub.environ())
    assert gpu["nvlink_domain"] == "00" * 15 + "07.4"


@pytest.mark.long
def test_gb200_is_in_a_fabric_and_an_h100_board_is_not(nvml_stub: Stub) -> None:
    domains = {}
    for name in ("gb200", "h100"):
        nvml_stub.drive(recording.load(name).text)
        (gpu,) = read_topology(nvml_stub.environ())
        domains[name] = gpu.get("nvlink_domain", "")
    assert domains == {"gb200": "00" * 15 + "01.2", "h100": ""}


def test_gpu_without_nvlink_or_driver_support(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        device 0 uuid GPU-a
        device 1 uuid GPU-b
        fail 1 nvmlDeviceGetNvLinkState 4
        fail 1 nvmlDeviceGetPciInfo_v3 999
    """)
    plain, unsupported = read_topology(nvml_stub.environ())
    assert (plain["nvlinks_active"], plain["nvlinks_total"], "nvswitch" in plain) == (0, 0, False)
    assert set(unsupported) == {"index", "name"}


def test_slice_has_address_of_its_gpu(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        device 0 uuid GPU-a
        device 0 bus 4e
        device 1 uuid MIG-x
        device 1 parent 0
    """)
    (gpu,) = read_topology(nvml_stub.environ(CUDA_VISIBLE_DEVICES="MIG-x"))
    assert gpu["pci_address"] == "0000:4e:00.0"


def test_missing_driver_raises_with_reason(nvml_stub: Stub) -> None:
    nvml_stub.drive("fail * nvmlInitWithFlags 9")
    assert read_topology(nvml_stub.environ()) == "DRIVER_NOT_LOADED: the NVIDIA driver is not loaded"
