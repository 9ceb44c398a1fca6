"""All queries through the real nvidia-ml-py, in a child process that loads the stub."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.telemetry.readers.nvml_gpm import METRICS
from clustertrain.telemetry.readers.nvml_queries import decode_throttle_reasons
from tests.fakes.nvml.build import Stub
from tests.unit.telemetry.nvml_steps import run_steps

CODES = {
    1: "UNINITIALIZED",
    2: "INVALID_ARGUMENT",
    3: "NOT_SUPPORTED",
    4: "NO_PERMISSION",
    6: "NOT_FOUND",
    9: "DRIVER_NOT_LOADED",
    10: "TIMEOUT",
    13: "FUNCTION_NOT_FOUND",
    18: "LIB_RM_VERSION_MISMATCH",
    999: "UNKNOWN",
}


def read_all(env: dict[str, str]) -> dict[str, Any]:
    """Return the devices and one reading of all their fields."""
    reading = run_steps(env, ["devices"], ["read", "fast"], ["read", "slow"])
    if isinstance(reading, dict):
        return reading
    info, fast, slow = reading
    info["values"] = {u: v if isinstance(v, str) else {**v, **slow[u]} for u, v in fast.items()}
    return {"error": None, **info}


def test_all_fields_in_expected_units(nvml_stub: Stub) -> None:
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
        device 0 memory_busy 40
        device 0 reasons 0x4
        device 0 pcie_tx 123456789012
        device 0 pcie_rx 5
        device 0 nvlinks 18
        device 0 nvlinks_active 17
        device 0 nvlink_tx 4096
        device 0 nvlink_rx 8192
        device 0 processes 3
        device 0 memory_temperature 74
        device 0 ecc_corrected 7
        device 0 ecc_uncorrected 1
        device 0 remapped 2
        device 0 remap_pending 1
        device 0 nvlink_errors 6
        device 0 pcie_replays 9
        device 0 gpm 1
    """)
    reading = read_all(nvml_stub.environ())
    assert reading["driver"] == "575.57.08"
    (device,) = reading["devices"]
    assert device["uuid"] == "GPU-a"
    assert (device["index"], device["minor"], device["name"]) == (0, 4, "NVIDIA H100 80GB HBM3")
    assert device["memory_total_bytes"] == 85899345920
    values = reading["values"]["GPU-a"]
    expected = {
        "utilization": 0.57,
        "memory_used_bytes": 42949672960,  # NVML's second version excludes the driver's reserve of 500 MB
        "power_w": 412.345,
        "temperature_c": 61,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "energy_j": 9000.5,
        "memory_busy": 0.4,
        "throttle_power": 1.0,
        "throttle_thermal": 0.0,
        "throttle_hardware": 0.0,
        "pcie_tx_bytes": 123456789012,
        "pcie_rx_bytes": 5,
        "nvlink_tx_bytes": 4096,
        "nvlink_rx_bytes": 8192,
        "processes": 3,
        "memory_temperature_c": 74,
        "ecc_corrected": 7,
        "ecc_uncorrected": 1,
        "remapped_rows": 2,
        "remap_pending": 1,
        "remap_failed": 0,
        "nvlinks_active": 17,
        "nvlink_errors": 6,
        "pcie_replays": 9,
    }
    assert {name: values[name] for name in expected} == expected
    # A mean needs two samples.
    assert set(values) - set(expected) == {"sm_activity", "tensor_activity", "dram_activity"}
    assert values["sm_activity"].startswith("NO_DATA")


def test_old_driver_without_newer_calls(nvml_stub: Stub) -> None:
    nvml_stub.install_driver("470.103.01")
    nvml_stub.drive("""
        driver 470.103.01
        device 0 uuid GPU-a
        device 0 memory_used 1000
        device 0 memory_reserved 24
        device 0 temperature 44
        device 0 reasons 0x40
        device 0 energy 5000
        device 0 processes 2
        fail 0 nvmlDeviceGetFieldValues 3
    """)
    reading = read_all(nvml_stub.environ())
    assert reading["devices"][0]["memory_includes_reserved"] is True
    assert reading["values"]["GPU-a"]["memory_used_bytes"] == 1024
    values = reading["values"]["GPU-a"]
    assert (values["temperature_c"], values["throttle_thermal"], values["energy_j"]) == (44, 1, 5)
    assert values["processes"] == 2
    assert values["pcie_tx_bytes"].startswith("NOT_SUPPORTED")
    assert values["sm_activity"].startswith("FUNCTION_NOT_FOUND")


def test_field_that_the_driver_does_not_know(nvml_stub: Stub) -> None:
    """The handle is valid, so the reason is not an invalid argument."""
    nvml_stub.drive("driver 535.104.05\ndevice 0 uuid GPU-a\ndevice 0 energy 5000\n")
    (values,) = read_all(nvml_stub.environ())["values"].values()
    assert values["pcie_tx_bytes"] == "NOT_SUPPORTED: this driver does not know it"
    assert values["energy_j"] == 5


@pytest.mark.parametrize("generation", [5, *(pytest.param(older, marks=pytest.mark.long) for older in (2, 3, 4))])
def test_nvlink_errors_of_each_generation(nvml_stub: Stub, generation: int) -> None:
    """Totals before Hopper, links one by one on Hopper, a sum from Blackwell on (NVML's change log, v525 and v565)."""
    nvml_stub.drive(f"device 0 nvlinks 12\ndevice 0 nvlink_errors 7\ndevice 0 nvlink_version {generation}\n")
    (values,) = read_all(nvml_stub.environ())["values"].values()
    assert values["nvlink_errors"] == 7


def test_failure_gives_reason_not_zero(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        device 0 uuid GPU-a
        device 0 utilization 4000000
        fail 0 nvmlDeviceGetPowerUsage 3
        fail 0 nvmlDeviceGetTotalEnergyConsumption 4
        fail 0 field:83 3
        fail 0 nvmlDeviceGetClockInfo 999
        fail 0 nvmlDeviceGetMinorNumber 3
        device 1 uuid GPU-b
        fail 1 * 15
        device 2 uuid GPU-c
    """)
    reading = read_all(nvml_stub.environ())
    values = reading["values"]["GPU-a"]
    assert values["utilization"].startswith("IMPLAUSIBLE")
    assert values["power_w"].startswith("NOT_SUPPORTED")
    assert values["energy_j"].startswith("NO_PERMISSION")
    assert values["sm_clock_mhz"].startswith("UNKNOWN")
    assert values["temperature_c"] == 30
    assert reading["devices"][0]["minor"] is None
    # A GPU off the bus stays listed, and so do the GPUs after it.
    assert [d["uuid"] for d in reading["devices"]] == ["GPU-a", "unreadable-1", "GPU-c"]
    assert reading["devices"][1]["reason"].startswith("GPU_IS_LOST")
    assert reading["values"]["GPU-c"]["power_w"] == 70
    assert reading["values"]["unreadable-1"].startswith("lost: GPU_IS_LOST")


def test_error_code_affects_only_its_field(nvml_stub: Stub) -> None:
    nvml_stub.drive(
        "".join(
            f"device {c % 64} uuid GPU-{c}\nfail {c % 64} nvmlDeviceGetPowerUsage {c}\nfail {c % 64} field:197 {c}\n"
            for c in CODES
        )
    )
    reading = read_all(nvml_stub.environ())["values"]
    assert len(reading) == len(CODES)
    for code, name in CODES.items():
        values = reading[f"GPU-{code}"]
        assert values["power_w"].startswith(f"{name}: ")
        # Of a single field it means that the driver does not know the field.
        of_field = "NOT_SUPPORTED" if name == "INVALID_ARGUMENT" else name
        assert values["pcie_tx_bytes"].startswith(f"{of_field}: ")
        assert values["pcie_rx_bytes"] == 0
        assert values["temperature_c"] == 30


@pytest.mark.parametrize("code", [3, pytest.param(4, marks=pytest.mark.long)])
def test_driver_without_support_gives_only_reasons(nvml_stub: Stub, code: int) -> None:
    calls = ["nvmlDeviceGet" + n for n in ("MemoryInfo", "MemoryInfo_v2", "FieldValues", "PowerUsage", "TemperatureV")]
    calls += ["nvmlDeviceGet" + n for n in ("UtilizationRates", "Temperature", "ClockInfo", "TotalEnergyConsumption")]
    calls += ["nvmlDeviceGetCurrentClocks" + n for n in ("EventReasons", "ThrottleReasons")]
    calls += ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows"]
    calls += ["nvmlDeviceGetPcieReplayCounter", "nvmlDeviceGetNvLinkState", "nvmlGpmQueryDeviceSupport"]
    nvml_stub.drive("device 0 uuid GPU-a\n" + "".join(f"fail * {name} {code}\n" for name in calls))
    values = read_all(nvml_stub.environ())["values"]["GPU-a"]
    assert {name for name, v in values.items() if str(v).startswith(CODES[code])} == set(values)


def test_blank_values_are_rejected(nvml_stub: Stub) -> None:
    """slurm-job-exporter#53: 1.4e16 percent."""
    keys = ("utilization", "memory_busy", "memory_used", "power", "energy", "temperature", "sm_clock", "processes")
    drive = "".join(f"device 0 {key} 1.4e16\n" for key in keys if key != "processes")
    nvml_stub.drive(drive + "device 0 pcie_tx 9223372036854775792\ndevice 0 reasons 0\n")
    (values,) = read_all(nvml_stub.environ())["values"].values()
    bad = {name for name, value in values.items() if str(value).startswith("IMPLAUSIBLE")}
    assert bad == {
        "utilization",
        "memory_busy",
        "memory_used_bytes",
        "power_w",
        "energy_j",
        "temperature_c",
        "sm_clock_mhz",
        "pcie_tx_bytes",
    }


def test_nvlink5_uses_other_field_ids(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        device 0 nvlinks 18
        device 0 nvlink_version 5
        device 0 nvlink_tx 1000
        device 0 nvlink_rx 2000
        device 0 nvlink_errors 3
    """)
    (values,) = read_all(nvml_stub.environ())["values"].values()
    assert (values["nvlink_tx_bytes"], values["nvlink_rx_bytes"], values["nvlink_errors"]) == (1000, 2000, 3)


def test_implausible_values_are_rejected(nvml_stub: Stub) -> None:
    """A 32-bit byte counter overflows within a second, and no memory is at 0 °C (rezolus#1196)."""
    nvml_stub.drive("device 0 narrow 1\ndevice 0 pcie_tx 123456789012\ndevice 0 memory_temperature 0\n")
    (values,) = read_all(nvml_stub.environ())["values"].values()
    assert values["pcie_tx_bytes"].startswith("NOT_SUPPORTED: the driver's 32-bit counter")
    assert values["memory_temperature_c"].startswith("NOT_SUPPORTED: the driver returned 0 °C")


def test_gpu_without_nvlink_and_gpm(nvml_stub: Stub) -> None:
    nvml_stub.drive("device 0 uuid GPU-a\n")
    (values,) = read_all(nvml_stub.environ())["values"].values()
    missing = {name: v for name, v in values.items() if isinstance(v, str)}
    activities = {"sm_activity", "tensor_activity", "dram_activity"}
    assert set(missing) == {"nvlink_tx_bytes", "nvlink_rx_bytes", "nvlinks_active", "nvlink_errors"} | activities
    assert all(v.startswith("NOT_SUPPORTED") for v in missing.values())
    assert "Hopper" in missing["sm_activity"]


@pytest.mark.parametrize(
    ("mask", "power", "thermal", "hardware"),
    [
        (0x0, 0, 0, 0),
        (0x1, 0, 0, 0),  # idle
        (0x4, 1, 0, 0),
        (0x20, 0, 1, 0),
        (0x48, 0, 1, 0),  # a hardware slowdown due to heat counts as thermal
        (0x88, 0, 0, 1),
        (0x8, 0, 0, 1),
        (0xC8, 0, 1, 1),
    ],
)
def test_throttle_reasons(mask: int, power: int, thermal: int, hardware: int) -> None:
    assert decode_throttle_reasons(mask) == (power, thermal, hardware)


def test_mig_slices(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        device 0 uuid GPU-a
        device 1 uuid MIG-x
        device 1 parent 0
        device 1 memory_used 2048
        device 1 processes 1
    """)
    reading = read_all(nvml_stub.environ())
    assert [(d["uuid"], d["parent"]) for d in reading["devices"]] == [("GPU-a", None), ("MIG-x", "GPU-a")]
    assert reading["values"]["MIG-x"]["memory_used_bytes"] == 2048
    values = reading["values"]["MIG-x"]
    assert values["processes"] == 1
    assert values["utilization"].startswith("NOT_SUPPORTED")
    assert values["power_w"] == "NOT_SUPPORTED: NVML reports it only for whole GPUs, and this is a MIG slice"


def test_slices_named_by_uuid_are_read(nvml_stub: Stub) -> None:
    nvml_stub.drive("device 0 uuid GPU-a\ndevice 1 uuid MIG-x\ndevice 1 parent 0\ndevice 2 uuid GPU-b\n")
    reading = read_all(nvml_stub.environ(CUDA_VISIBLE_DEVICES="GPU-b,MIG-x"))
    assert list(reading["values"]) == ["GPU-b", "MIG-x"]


def test_no_library(nvml_stub: Stub) -> None:
    env = nvml_stub.environ(LD_LIBRARY_PATH=str(nvml_stub.folder / "empty"))
    reason = read_all(env).get("error")
    if reason is not None:  # a machine with an installed driver finds it
        assert reason == "LIBRARY_NOT_FOUND: libnvidia-ml.so.1 not found: no NVIDIA driver on this machine"


def test_no_driver(nvml_stub: Stub) -> None:
    nvml_stub.drive("fail * nvmlInitWithFlags 9")
    assert read_all(nvml_stub.environ())["error"] == "DRIVER_NOT_LOADED: the NVIDIA driver is not loaded"


@pytest.mark.long
def test_stub_creates_devices_of_its_host(nvml_stub: Stub) -> None:
    env = nvml_stub.environ(NVML_STUB_FILE=str(nvml_stub.folder / "gpus-of-%h.txt"), NVML_STUB_DEVICES="8")
    reading = read_all(env)
    assert len({d["uuid"] for d in reading["devices"]}) == 8
    assert reading["devices"] == read_all(env)["devices"]
    assert all(0 < v["utilization"] <= 1 for v in reading["values"].values())
    for values in reading["values"].values():
        assert {name for name, v in values.items() if isinstance(v, str)} == set(METRICS)  # they need two samples
