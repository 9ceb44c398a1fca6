"""Readings over time of a load played by the stub."""

from __future__ import annotations

import time

import pytest

from tests.fakes.nvml.build import Stub
from tests.unit.telemetry.nvml_steps import run_steps

pytestmark = pytest.mark.long

# Four GPUs of a job: one idles, one overheats and one is slow without a reason from the driver.
LOAD = """
    device 0 uuid GPU-good
    device 1 uuid GPU-idle
    device 2 uuid GPU-hot
    device 3 uuid GPU-slow
    at 0 utilization 10 97
    at 0 power 10 650000
    at 0 sm_clock 10 1980
    at 2 utilization 10 98
    at 2 power 10 640000
    at 2 sm_clock 10 1980
    at 2 temperature 10 60
    ramp 2 temperature 60 87
    at 2 reasons 60 0x40
    at 2 sm_clock 60 1980
    ramp 2 sm_clock 90 1200
    ramp 2 power 90 400000
    at 3 utilization 10 99
    at 3 power 10 500000
    at 3 sm_clock 10 1410
"""


def load_at(t: float) -> str:
    return f"start {time.time() - t}\n{LOAD}"


def test_each_gpu_follows_its_load(nvml_stub: Stub) -> None:
    nvml_stub.drive(load_at(0))
    times = (0, 30, 100)
    requests = [step for t in times for step in (["drive", load_at(t)], ["read", "fast"])]
    start, busy, late = run_steps(nvml_stub.environ(), *requests)[1::2]
    assert all(gpu["utilization"] == 0 for gpu in start.values())
    assert [gpu["utilization"] for gpu in busy.values()] == [0.97, 0, 0.98, 0.99]
    assert [gpu["sm_clock_mhz"] for gpu in busy.values()] == [1980, 345, 1980, 1410]
    assert busy["GPU-hot"]["temperature_c"] == pytest.approx(60 + 27 * 20 / 50, abs=1.1)
    assert [gpu["throttle_thermal"] for gpu in busy.values()] == [0] * 4
    assert [gpu["throttle_thermal"] for gpu in late.values()] == [0, 0, 1, 0]
    assert late["GPU-hot"]["sm_clock_mhz"] == 1200
    assert late["GPU-slow"]["throttle_power"] == late["GPU-slow"]["throttle_hardware"] == 0


def test_energy_is_the_integral_of_power(nvml_stub: Stub) -> None:
    """Energy follows from the whole file, regardless of readings in between."""
    ramp = "device 0 uuid GPU-a\ndevice 0 power 100000\nat 0 power 10 300000\nramp 0 power 30 500000\n"
    nvml_stub.drive(f"start {time.time() - 40}\n{ramp}")
    (first,) = run_steps(nvml_stub.environ(), ["read", "fast"])
    assert first["GPU-a"]["energy_j"] == pytest.approx(10 * 100 + 20 * 400 + 10 * 500, rel=0.1)


def test_counter_continues_after_file_change(nvml_stub: Stub) -> None:
    nvml_stub.drive(f"start {time.time() - 100}\ndevice 0 pcie_tx_rate 1e9\n")
    later = f"start {time.time() - 10}\ndevice 0 pcie_tx_rate 2e9\n"
    before, _, after = run_steps(nvml_stub.environ(), ["read", "fast"], ["drive", later], ["read", "fast"])
    (a,), (b,) = before.values(), after.values()
    assert a["pcie_tx_bytes"] == pytest.approx(1e11, rel=0.1)
    assert b["pcie_tx_bytes"] - a["pcie_tx_bytes"] == pytest.approx(2e10, rel=0.5)


def test_gpu_lost_and_recovered(nvml_stub: Stub) -> None:
    program = "device 0 uuid GPU-a\ndevice 1 uuid GPU-b\nfail 0 * 15 60 90\n"

    def at(t: float) -> list[str]:
        return ["drive", f"start {time.time() - t}\n{program}"]

    nvml_stub.drive(f"start {time.time()}\n{program}")
    read = ["read", "fast"]
    results = run_steps(
        nvml_stub.environ(), read, at(70), read, ["read", "slow"], ["wait", 6], read, at(100), ["wait", 11], read
    )
    healthy, lost_fast, lost_slow, still_lost, recovered = results[0], results[2], results[3], results[5], results[8]
    assert healthy["GPU-a"]["power_w"] == 70
    for reading in (lost_fast, lost_slow, still_lost):
        assert reading["GPU-a"] == "lost: GPU_IS_LOST: the GPU has fallen off the bus or cannot be reached"
        assert not isinstance(reading["GPU-b"], str)
    assert recovered["GPU-a"]["power_w"] == 70


def test_lost_gpu_does_not_hide_others_from_a_new_session(nvml_stub: Stub) -> None:
    """nvml.h: nvmlDeviceGetHandleByUUID fails if any GPU is lost."""
    boards = "device 0 uuid GPU-a\ndevice 1 uuid GPU-b\ndevice 2 uuid MIG-c\ndevice 2 parent 1\n"
    nvml_stub.drive(boards)
    lost = ["drive", boards + "fail 0 * 15\n"]
    *_, after = run_steps(nvml_stub.environ(), ["read", "fast"], lost, ["reopen"], ["read", "fast"])
    assert after["GPU-a"].startswith("lost: GPU_IS_LOST")
    assert after["MIG-c"]["memory_used_bytes"] == 1 << 30


def test_power_is_a_mean_of_a_second_except_on_older_gpus(nvml_stub: Stub) -> None:
    """While power rises by 1 W per second, the mean is half a watt behind."""
    load = "device 1 power_averaged 0\n" + "".join(f"ramp {i} power 1000 1070000\n" for i in (0, 1))
    nvml_stub.drive(load)
    *_, now = run_steps(nvml_stub.environ(), ["drive", load, 100], ["read", "fast"])
    mean, momentary = (gpu["power_w"] for gpu in now.values())
    assert mean >= 169.5
    assert momentary - mean > 0.45


def test_activity_is_mean_since_last_reading(nvml_stub: Stub) -> None:
    nvml_stub.drive("device 0 uuid GPU-a\ndevice 0 sm_activity 80\ndevice 0 tensor_activity 40\n")
    read = ["read", "fast"]
    first, second, soon, live_samples = run_steps(
        nvml_stub.environ(), read, ["read-until", "sm_activity"], read, ["close"]
    )
    assert first["GPU-a"]["sm_activity"] == "NO_DATA: a mean needs two samples"
    activity = [second["GPU-a"][name] for name in ("sm_activity", "tensor_activity", "dram_activity")]
    assert activity == pytest.approx([0.8, 0.4, 0.0], abs=0.01)
    # Within 0.1 s the last means are kept: a shorter interval would be wrong (NVIDIA/DCGM#310).
    assert soon["GPU-a"]["sm_activity"] == pytest.approx(0.8, abs=0.01)
    assert live_samples == 0, "NVML samples were not freed"


def test_slice_has_activity_of_its_instance(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        device 0 uuid GPU-a
        device 0 gpm 1
        device 1 uuid MIG-x
        device 1 parent 0
        device 1 gpu_instance 3
        device 1 gpm 1
        device 1 utilization 75
        device 1 sm_activity 50
        device 2 uuid MIG-y
        device 2 parent 0
        device 2 gpu_instance 5
        device 2 gpm 1
    """)
    values, live_samples = run_steps(nvml_stub.environ(), ["read-until", "sm_activity"], ["close"])
    assert list(values) == ["MIG-x", "MIG-y"]
    assert (values["MIG-x"]["utilization"], values["MIG-x"]["sm_activity"]) == pytest.approx((0.75, 0.5), abs=0.01)
    assert (values["MIG-y"]["utilization"], values["MIG-y"]["sm_activity"]) == (0.0, 0.0)
    assert live_samples == 0


def test_nvml_is_reopened(nvml_stub: Stub) -> None:
    healthy = "device 0 uuid GPU-a\ndevice 0 sm_activity 80\n"
    nvml_stub.drive(healthy)
    results = run_steps(
        nvml_stub.environ(),
        ["read-until", "sm_activity"],
        ["drive", healthy + "fail 0 * 1\n"],
        ["read", "fast"],
        ["session"],
        ["drive", healthy],
        ["reopen"],
        ["read-until", "sm_activity"],
        ["close"],
    )
    assert results[2]["GPU-a"]["power_w"].startswith("UNINITIALIZED")
    assert results[3] == [True]
    assert results[6]["GPU-a"]["sm_activity"] == pytest.approx(0.8, abs=0.01)
    assert results[7] == 0
