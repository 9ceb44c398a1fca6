"""Down to ctypes: the real nvidia-ml-py, in a child that loads the stub."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.nvml_stub.build import Stub

PROGRAM = """
import json
from clustertrain.telemetry.nvml import FIELDS, Nvml, NvmlError
import msgspec
nvml, out = Nvml(), {"devices": [], "values": {}, "driver": None, "error": None}
try:
    out["driver"] = nvml.open()
    for device in nvml.devices():
        out["devices"].append(msgspec.to_builtins(device))
        values = out["values"][device.uuid] = {}
        for field in FIELDS:
            try:
                values[field] = nvml.read(device.uuid, field)
            except NvmlError as e:
                values[field] = e.reason
    nvml.close()
except NvmlError as e:
    out["error"] = e.reason
print(json.dumps(out))
"""


def ask(env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_all_fields_in_our_units(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        driver 575.57.08
        device 0 uuid GPU-a
        device 0 minor 4
        device 0 name NVIDIA H100 80GB HBM3
        device 0 memory_total 85899345920
        device 0 memory_used 42949672960
        device 0 utilization 57
        device 0 power 412345
        device 0 energy 9000500
        device 0 temperature 61
        device 0 sm_clock 1980
        device 0 memory_clock 2619
    """)
    found = ask(nvml_stub.environ())
    assert found["driver"] == "575.57.08"
    (device,) = found["devices"]
    assert device["uuid"] == "GPU-a"
    assert (device["index"], device["minor"], device["name"]) == (0, 4, "NVIDIA H100 80GB HBM3")
    assert device["memory_total_bytes"] == 85899345920
    assert found["values"]["GPU-a"] == {
        "utilization": 0.57,
        "memory_used_bytes": 42949672960,  # NVML's second call: without the 500 MB that the driver reserves
        "power_w": 412.345,
        "temperature_c": 61,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "energy_j": 9000.5,
    }


def test_an_old_driver_without_the_newer_calls(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        device 0 uuid GPU-a
        device 0 memory_used 1000
        device 0 memory_reserved 24
        device 0 temperature 44
        fail 0 nvmlDeviceGetMemoryInfo_v2 13
        fail 0 nvmlDeviceGetTemperatureV 13
    """)
    found = ask(nvml_stub.environ())
    assert found["devices"][0]["memory_includes_reserved"] is True
    assert found["values"]["GPU-a"]["memory_used_bytes"] == 1024
    assert found["values"]["GPU-a"]["temperature_c"] == 44


def test_each_failure_is_a_reason_and_never_a_zero(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        device 0 uuid GPU-a
        device 0 utilization 4000000
        fail 0 nvmlDeviceGetPowerUsage 3
        fail 0 nvmlDeviceGetTotalEnergyConsumption 4
        fail 0 nvmlDeviceGetClockInfo 999
        fail 0 nvmlDeviceGetMinorNumber 3
        device 1 uuid GPU-b
        fail 1 * 15
        device 2 uuid GPU-c
    """)
    found = ask(nvml_stub.environ())
    values = found["values"]["GPU-a"]
    assert values["utilization"].startswith("IMPLAUSIBLE")
    assert values["power_w"].startswith("NOT_SUPPORTED")
    assert values["energy_j"].startswith("NO_PERMISSION")
    assert values["sm_clock_mhz"].startswith("UNKNOWN")
    assert values["temperature_c"] == 30
    assert found["devices"][0]["minor"] is None
    # A GPU that has left the bus hides neither itself nor the ones after it.
    assert [d["uuid"] for d in found["devices"]] == ["GPU-a", "unreadable-1", "GPU-c"]
    assert found["devices"][1]["reason"].startswith("GPU_IS_LOST")
    assert found["values"]["GPU-c"]["power_w"] == 70


def test_mig_slices(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        device 0 uuid GPU-a
        device 1 uuid MIG-x
        device 1 parent 0
        device 1 memory_used 2048
    """)
    found = ask(nvml_stub.environ())
    assert [(d["uuid"], d["parent"]) for d in found["devices"]] == [("GPU-a", None), ("MIG-x", "GPU-a")]
    assert found["values"]["MIG-x"]["memory_used_bytes"] == 2048
    assert found["values"]["MIG-x"]["utilization"].startswith("NOT_SUPPORTED")


def test_no_library(nvml_stub: Stub) -> None:
    env = nvml_stub.environ(LD_LIBRARY_PATH=str(nvml_stub.folder / "empty"))
    reason = ask(env)["error"]
    if reason is not None:  # a machine with a driver of its own finds that one
        assert reason == "LIBRARY_NOT_FOUND: libnvidia-ml.so.1 not found: no NVIDIA driver on this machine"


def test_no_driver(nvml_stub: Stub) -> None:
    nvml_stub.drive("fail * nvmlInitWithFlags 9")
    assert ask(nvml_stub.environ())["error"] == "DRIVER_NOT_LOADED: the NVIDIA driver is not loaded"


def test_the_stub_makes_up_devices_of_its_host(nvml_stub: Stub) -> None:
    env = nvml_stub.environ(NVML_STUB_FILE=str(nvml_stub.folder / "gpus-of-%h.txt"), NVML_STUB_DEVICES="8")
    found = ask(env)
    assert len({d["uuid"] for d in found["devices"]}) == 8
    assert found["devices"] == ask(env)["devices"]
    assert all(0 < v["utilization"] <= 1 for v in found["values"].values())
