"""Host-wide metrics of the node, for all users and jobs: processors, memory, load, network and disks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from clustertrain import clock
from clustertrain.telemetry import fields
from clustertrain.telemetry.readers import sysfs

# Order of HostReader's values; :mod:`.processes` reads the fields of the job's processes.
HOST_FIELDS = tuple(f.name for f in fields.HOST if not f.name.startswith("job_"))

_MIN_INTERVAL_S = 0.05  # the kernel counts processor time in ticks of 10 ms
_COUNTER_PAIRS = {
    ("network_rx_bytes", "network_tx_bytes"): sysfs.NETWORK,
    ("infiniband_rx_bytes", "infiniband_tx_bytes"): sysfs.INFINIBAND,
    ("disk_read_bytes", "disk_write_bytes"): sysfs.DISKS,
}


class HostFacts(msgspec.Struct, frozen=True):
    cpu_count: int | None
    memory_total_bytes: int | None


class HostReader:
    """Reader of host-wide fields. A field that cannot be read is None, with its reason in ``reasons``.

    Args:
        root: folder that contains ``sys``.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.reasons: dict[str, str] = {}
        self._counters = {
            names: sysfs.DeviceCounters(device_class, root) for names, device_class in _COUNTER_PAIRS.items()
        }
        self._last_cpu_times: tuple[float, float, float] | None = None
        self._read_cpu_busy()

    def read_facts(self) -> HostFacts:
        try:
            total = int(psutil.virtual_memory().total)
        except (OSError, psutil.Error):
            total = None
        return HostFacts(psutil.cpu_count(), total)

    def read(self) -> list[float | None]:
        """Return the values in the order of HOST_FIELDS."""
        values: dict[str, float | None] = {
            "cpu": self._read_cpu_busy(),
            "memory_used_bytes": self._read_or_none("memory_used_bytes", _read_memory_used),
            "load1": self._read_or_none("load1", _read_load1),
        }
        for names, counters in self._counters.items():
            values |= self._read_pair(names, counters)
        return [values[name] for name in HOST_FIELDS]

    def _read_or_none(self, field: str, read_value: Callable[[], float]) -> float | None:
        try:
            value = read_value()
        except (OSError, psutil.Error, ValueError) as e:
            self.reasons[field] = f"{type(e).__name__}: {e}"
            return None
        self.reasons.pop(field, None)
        return value

    def _read_pair(self, names: tuple[str, str], counters: sysfs.DeviceCounters) -> dict[str, float | None]:
        try:
            values = counters.read()
        except sysfs.NotAvailable as e:
            reason = f"NOT_SUPPORTED: {e}"
        except (OSError, ValueError, IndexError) as e:
            reason = f"{type(e).__name__}: {e}"
        else:
            for name in names:
                self.reasons.pop(name, None)
            return dict(zip(names, values, strict=True))
        self.reasons |= dict.fromkeys(names, reason)
        return dict.fromkeys(names)

    def _read_cpu_busy(self) -> float | None:
        """Return the busy share of all processors since the last call; None on the first call."""
        now = clock.monotonic()
        busy_total = self._read_cpu_times()
        if busy_total is None:
            return None
        before, current = self._last_cpu_times, (now, *busy_total)
        if before is not None and now - before[0] < _MIN_INTERVAL_S:
            self.reasons["cpu"] = f"NO_DATA: less than {_MIN_INTERVAL_S} s since the last reading"
            return None
        self._last_cpu_times = current
        if before is None or current[2] <= before[2]:
            self.reasons["cpu"] = "NO_DATA: a share needs two readings"
            return None
        return min(1.0, max(0.0, (current[1] - before[1]) / (current[2] - before[2])))

    def _read_cpu_times(self) -> tuple[float, float] | None:
        try:
            times = psutil.cpu_times()
        except (OSError, psutil.Error) as e:
            self.reasons["cpu"] = f"{type(e).__name__}: {e}"
            return None
        self.reasons.pop("cpu", None)
        # Linux includes guest time in user time.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return total - times.idle - getattr(times, "iowait", 0.0), total


def _read_memory_used() -> float:
    memory = psutil.virtual_memory()
    # Without the page cache, which the kernel can reclaim: psutil's "available" is what a job can use.
    return float(memory.total - memory.available)


def _read_load1() -> float:
    return os.getloadavg()[0]
