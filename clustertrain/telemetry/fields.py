"""Registry of recorded fields: name in files, JSON and exports, unit, and sampling pace.

A column is a device and a field: ``gpu0.utilization`` (numbered as in the header), ``host.cpu``, ``rank5.step``. A
missing value is NaN, never 0; the reason is recorded with it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MetricType = Literal["gauge", "counter"]
Pace = Literal["fast", "slow"]

FAST: Pace = "fast"  # every tick, 1 Hz by default
SLOW: Pace = "slow"  # every 10 s: these take the driver or psutil milliseconds


class Field(msgspec.Struct, frozen=True):
    """One recorded field of a GPU, the host or a rank."""

    name: str
    metric_type: MetricType
    """A gauge has a value at a moment; only differences of a counter are meaningful, and it may restart at 0."""
    pace: Pace
    unit: str
    max_valid: float
    """Highest plausible value; broken drivers return huge numbers for missing values."""
    description: str


def _gauge(name: str, unit: str, max_valid: float, description: str, pace: Pace = FAST) -> Field:
    return Field(name, "gauge", pace, unit, max_valid, description)


def _counter(name: str, unit: str, description: str, pace: Pace = FAST, max_valid: float = 9e18) -> Field:
    return Field(name, "counter", pace, unit, max_valid, description)  # NVIDIA's 64-bit "no value" is 2**63 - 16


GPU = (
    _gauge("utilization", "ratio", 1.0, "share of time in which a kernel ran"),
    _gauge("memory_busy", "ratio", 1.0, "share of time in which device memory was read or written"),
    _gauge("memory_used_bytes", "bytes", 1e14, "device memory in use, without what the driver reserves"),
    _gauge("power_w", "W", 1e5, "power drawn by the board"),
    _gauge("temperature_c", "°C", 1e3, "temperature of the chip"),
    _gauge("sm_clock_mhz", "MHz", 1e5, "clock of the multiprocessors"),
    _gauge("memory_clock_mhz", "MHz", 1e5, "clock of the memory"),
    _gauge("throttle_power", "ratio", 1.0, "1 while the clock is held down by the power limit"),
    _gauge("throttle_thermal", "ratio", 1.0, "1 while the clock is held down by heat"),
    _gauge("throttle_hardware", "ratio", 1.0, "1 while the clock is held down by the board or the power supply"),
    _gauge("sm_activity", "ratio", 1.0, "share of time and multiprocessors with a warp resident (GPM)"),
    _gauge("tensor_activity", "ratio", 1.0, "share of time in which the tensor cores were active (GPM)"),
    _gauge("dram_activity", "ratio", 1.0, "share of the memory's bandwidth in use (GPM)"),
    _counter("energy_j", "J", "energy drawn since the driver was loaded", max_valid=1e13),  # 1 kW for 300 years
    _counter("pcie_tx_bytes", "bytes", "sent over PCIe"),
    _counter("pcie_rx_bytes", "bytes", "received over PCIe"),
    _counter("nvlink_tx_bytes", "bytes", "sent over NVLink"),
    _counter("nvlink_rx_bytes", "bytes", "received over NVLink"),
    _gauge("processes", "processes", 1e5, "processes that compute on it", SLOW),
    _gauge("memory_temperature_c", "°C", 1e3, "temperature of the memory", SLOW),
    _counter("ecc_corrected", "errors", "memory errors corrected since the driver was loaded", SLOW),
    _counter("ecc_uncorrected", "errors", "memory errors not corrected since the driver was loaded", SLOW),
    _gauge("remapped_rows", "rows", 1e5, "memory rows replaced for good; pages before Ampere", SLOW),
    _gauge("remap_pending", "ratio", 1.0, "1 while a row waits to be replaced by a reset", SLOW),
    _gauge("remap_failed", "ratio", 1.0, "1 once a row could not be replaced: the board must be replaced", SLOW),
    _gauge("nvlinks_active", "links", 1e3, "NVLinks that are up", SLOW),
    _counter("nvlink_errors", "errors", "NVLink replays, recoveries and CRC errors", SLOW),
    _counter("pcie_replays", "errors", "PCIe packets sent again", SLOW),
)

HOST = (
    _gauge("cpu", "ratio", 1.0, "busy share of all processors, of all users", SLOW),
    _gauge("memory_used_bytes", "bytes", 1e16, "memory in use without the page cache, of all users", SLOW),
    _gauge("load1", "processes", 1e7, "mean run queue of one minute", SLOW),
    _counter("network_rx_bytes", "bytes", "received by all interfaces except the loopback", SLOW),
    _counter("network_tx_bytes", "bytes", "sent by all interfaces except the loopback", SLOW),
    _counter("infiniband_rx_bytes", "bytes", "received by all InfiniBand and RoCE ports", SLOW),
    _counter("infiniband_tx_bytes", "bytes", "sent by all InfiniBand and RoCE ports", SLOW),
    _counter("disk_read_bytes", "bytes", "read from this node's disks", SLOW),
    _counter("disk_write_bytes", "bytes", "written to this node's disks", SLOW),
    _gauge("job_memory_bytes", "bytes", 1e16, "memory of the processes below the agent", SLOW),
    _counter("job_cpu_s", "s", "processor time of the processes below the agent", SLOW),
    _gauge("job_processes", "processes", 1e7, "processes below the agent", SLOW),
)

# From the rank's heartbeat (run/heartbeat.py) and from the kernel's accounting of its process.
RANK = (
    _counter("step", "steps", "optimizer steps done"),
    _gauge("phase", "phase", 100.0, "current phase of the rank, an index into PHASES of run/heartbeat.py"),
    _counter("tokens", "tokens", "tokens of this rank's steps"),
    _counter("data_wait_s", "s", "time in which the step waited for its data"),
    _counter("forward_s", "s", "time of forward passes, where no collective is part of one"),
    _gauge("memory_bytes", "bytes", 1e16, "resident memory of the rank's process", SLOW),
    _counter("cpu_s", "s", "processor time of the rank's process", SLOW),
)

_FIELDS_BY_DEVICE = {
    "gpu": {f.name: f for f in GPU},
    "host": {f.name: f for f in HOST},
    "rank": {f.name: f for f in RANK},
}


def column_name(device: str, field: str) -> str:
    """Return the column of a device's field: ``gpu0``, ``utilization`` -> ``gpu0.utilization``."""
    return f"{device}.{field}"


def split_column(column: str) -> tuple[str, str]:
    """Split a column into device and field: ``gpu0.utilization`` -> ``gpu0``, ``utilization``."""
    device, _, field = column.partition(".")
    return device, field


def find_field(column: str) -> Field | None:
    """Return the field of a column; None if a later version added it."""
    device, field = split_column(column)
    return _FIELDS_BY_DEVICE.get(device.rstrip("0123456789"), {}).get(field)


def column_names(gpu_count: int, ranks: list[int], pace: Pace) -> list[str]:
    """Return all columns of one pace for a node with ``gpu_count`` GPUs and these global ranks."""
    names = [column_name(f"gpu{i}", f.name) for i in range(gpu_count) for f in GPU if f.pace == pace]
    names += [column_name("host", f.name) for f in HOST if f.pace == pace]
    names += [column_name(f"rank{r}", f.name) for r in ranks for f in RANK if f.pace == pace]
    return names


_SCALE_BY_UNIT = {"ratio": 1e3, "W": 10.0, "J": 10.0, "s": 1e3}
_SCALE_BY_FIELD = {"load1": 100.0} | dict.fromkeys(
    # NVML counts NVLink traffic in KiB, which is precise enough for counters that grow by megabytes.
    ("pcie_tx_bytes", "pcie_rx_bytes", "nvlink_tx_bytes", "nvlink_rx_bytes"),
    1 / 1024,
)


def scale(column: str) -> float:
    """Return the factor that turns a column's values into integers for storage.

    Values are rounded to the nearest integer after scaling, which matches the precision of the sensors.
    """
    field = find_field(column)
    return 1e3 if field is None else _SCALE_BY_FIELD.get(field.name, _SCALE_BY_UNIT.get(field.unit, 1.0))
