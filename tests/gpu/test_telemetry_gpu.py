"""Telemetry of a real GPU: values read from NVML, compared with those of nvidia-smi at the same time."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW
from clustertrain.telemetry.readers.allocation import find_allocation
from clustertrain.telemetry.readers.gpu_reader import GpuReader
from clustertrain.telemetry.readers.nvml import Device, Nvml
from clustertrain.telemetry.readers.nvml_events import GpuEvents

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

WINDOW_S, EVERY_S = 12.0, 0.2
SETTLED_S = 3.0  # power is a mean over a second, and the clock needs time to settle


@pytest.fixture
def nvml() -> Iterator[Nvml]:
    library = Nvml()
    library.open()
    yield library
    library.close()


def find_torch_device(nvml: Nvml) -> Device:
    import torch

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return next(d for d in nvml.devices() if uuid in d.uuid)


def read_by_name(reader: GpuReader, pace: fields.Pace) -> dict[str, float | None]:
    row = reader.read(pace)
    assert row is not None, reader.lost_reason
    return dict(zip((f.name for f in fields.GPU if f.pace == pace), row, strict=True))


def test_every_field_has_a_value_or_a_reason(nvml: Nvml) -> None:
    devices = find_allocation(os.environ, nvml.devices()).devices  # without the boards of MIG slices
    assert devices
    for device in devices:
        assert device.reason is None
        assert device.uuid.startswith(("GPU-", "MIG-"))
        reader = GpuReader(nvml, device)
        reader.read(FAST)
        time.sleep(0.15)
        values = {**read_by_name(reader, FAST), **read_by_name(reader, SLOW)}
        for name, value in values.items():
            if value is None:
                reason = reader.reasons[name]
                assert not reason.startswith(("UNKNOWN", "IMPLAUSIBLE", "INVALID_ARGUMENT", "NO_DATA")), reason
        if device.parent is None:
            assert not {"utilization", "memory_used_bytes", "power_w", "temperature_c"} & set(reader.reasons)


def test_events_can_be_subscribed_without_waiting(nvml: Nvml) -> None:
    events = GpuEvents(nvml, find_allocation(os.environ, nvml.devices()).devices)
    events.open()
    assert all(e.kind in ("xid", "ecc_corrected", "ecc_uncorrected") for e in events.poll())
    for reason in events.reasons.values():
        assert reason.startswith(("NOT_SUPPORTED", "NO_PERMISSION")), reason


def start_nvidia_smi(uuid: str, out: Path) -> subprocess.Popen[bytes]:
    query = "power.draw,temperature.gpu,memory.used,clocks.sm,utilization.gpu"
    argv = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    with out.open("wb") as file:
        return subprocess.Popen([*argv, f"--loop-ms={int(1000 * EVERY_S)}"], stdout=file)


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="nvidia-smi is not installed")
def test_values_match_nvidia_smi(nvml: Nvml, tmp_path: Path) -> None:
    import torch

    device = find_torch_device(nvml)
    reader = GpuReader(nvml, device)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    smi = None
    try:
        while (at := time.monotonic() - start) < WINDOW_S:
            if at > SETTLED_S:
                smi = smi or start_nvidia_smi(device.uuid, tmp_path / "smi.csv")
                rows.append({"at": time.monotonic(), **read_by_name(reader, FAST)})
            end_of_interval = time.monotonic() + EVERY_S
            while time.monotonic() < end_of_interval:  # never idle, and never far ahead of the GPU
                a @ a
                torch.cuda.synchronize()
    finally:
        if smi is not None:
            smi.terminate()
            smi.wait(30)
    lines = [x.split(", ") for x in (tmp_path / "smi.csv").read_text().splitlines()]
    power, temperature, memory_mib, clock, utilization = (
        statistics.mean(map(float, c)) for c in zip(*lines, strict=True)
    )

    def mean(name: str) -> float:
        return statistics.mean(row[name] for row in rows)

    assert mean("power_w") == pytest.approx(power, rel=0.05)
    assert mean("temperature_c") == pytest.approx(temperature, abs=2)
    assert mean("memory_used_bytes") == pytest.approx(memory_mib * 2**20, rel=0.02)
    assert mean("sm_clock_mhz") == pytest.approx(clock, rel=0.05)
    assert mean("utilization") == pytest.approx(utilization / 100, abs=0.05)
    mean_power_w = (rows[-1]["energy_j"] - rows[0]["energy_j"]) / (rows[-1]["at"] - rows[0]["at"])
    assert mean_power_w == pytest.approx(mean("power_w"), rel=0.05)
    if "sm_activity" not in reader.reasons:
        assert mean("sm_activity") > 0.5
        assert mean("tensor_activity") > 0.2
    processes = read_by_name(reader, SLOW)["processes"]
    assert processes is None or processes >= 1  # others may share the GPU: a monitor, a display


def keep_busy_s(least_s: float) -> float:
    """Multiply matrices on the GPU for at least ``least_s`` and return the time by the GPU's clock."""
    import torch

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken_s = 0.0
    while taken_s < least_s:
        start.record()
        for _ in range(200):  # launched ahead, so that a slow host leaves no gaps
            a @ a
        end.record()
        end.synchronize()
        taken_s += start.elapsed_time(end) / 1000
    return taken_s


def test_gpm_samples_cover_whole_interval(nvml: Nvml) -> None:
    """A busy and an idle period are averaged by their shares, no matter when the readings occur."""
    reader = GpuReader(nvml, find_torch_device(nvml))
    read_by_name(reader, FAST)
    if "sm_activity" in reader.reasons and not reader.reasons["sm_activity"].startswith("NO_DATA"):
        pytest.skip(reader.reasons["sm_activity"])
    keep_busy_s(0.2)

    def measure(idle_s: float) -> tuple[float, float]:
        """Return the activity, and the share of the time in which the GPU was busy."""
        read_by_name(reader, FAST)
        start = time.monotonic()
        taken_s = keep_busy_s(1.0)
        time.sleep(idle_s)
        activity = read_by_name(reader, FAST)["sm_activity"]
        assert activity is not None
        return activity, taken_s / (time.monotonic() - start)

    full_activity, full_share = measure(0.0)
    activity, share = measure(1.0)
    assert activity == pytest.approx(full_activity / full_share * share, rel=0.25)
    assert 0 < share < 0.6 and full_activity / full_share > 0.5
