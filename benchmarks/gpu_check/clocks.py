"""Clocks, power and temperature of the GPUs while the parts run: a line of JSON per GPU and second."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

from clustertrain import clock
from clustertrain.telemetry import fields
from clustertrain.telemetry.readers.allocation import find_allocation
from clustertrain.telemetry.readers.gpu_reader import GpuReader
from clustertrain.telemetry.readers.nvml import Nvml, NvmlError

_FAST = [f.name for f in fields.GPU if f.pace == fields.FAST]
RECORDED = (
    "power_w", "temperature_c", "sm_clock_mhz", "memory_clock_mhz", "throttle_power", "throttle_thermal",
    "throttle_hardware", "utilization", "memory_used_bytes",
)  # fmt: skip


class ClockLog:
    """A log of this job's GPUs; empty where NVML does not open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nvml = Nvml()
        self._readers: list[GpuReader] = []
        self._last_s = -math.inf
        try:
            self._nvml.open()
            devices = self._nvml.devices()
            boards = {d.parent or d.uuid for d in find_allocation(os.environ, devices).devices}
            self._readers = [GpuReader(self._nvml, d) for d in devices if d.uuid in boards]
        except NvmlError:
            pass  # the check has said so already, or does not use a GPU

    def record(self, part: str) -> None:
        """Append a line per GPU, at most once per second."""
        if not self._readers or clock.monotonic() - self._last_s < 1.0:
            return
        self._last_s = clock.monotonic()
        with self._path.open("a") as file:
            for reader in self._readers:
                file.write(json.dumps({"t": clock.now(), "part": part, **self._read(reader)}) + "\n")

    def close(self) -> None:
        self._nvml.close()

    def summarize(self) -> list[dict[str, Any]]:
        """Return per part and GPU the mean power, the median clock, the highest temperature and the share throttled."""
        if not self._path.exists():
            return []
        rows = [json.loads(line) for line in self._path.read_text().splitlines()]
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault((row["part"], row["uuid"]), []).append(row)
        return [{"part": part, "gpu": uuid, **_summarize(group)} for (part, uuid), group in groups.items()]

    @staticmethod
    def _read(reader: GpuReader) -> dict[str, Any]:
        row = reader.read(fields.FAST)
        if row is None:
            return {"uuid": reader.device.uuid, "lost": reader.lost_reason}
        values = dict(zip(_FAST, row, strict=True))
        return {"uuid": reader.device.uuid, **{name: values[name] for name in RECORDED}}


def _summarize(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    def values(name: str) -> list[float]:
        return [row[name] for row in rows if row.get(name) is not None]

    throttled = [any(row.get(f"throttle_{cause}") for cause in ("power", "thermal", "hardware")) for row in rows]
    return {
        "samples": len(rows),
        "power_w": round(statistics.mean(values("power_w")), 1) if values("power_w") else None,
        "sm_clock_mhz": statistics.median(values("sm_clock_mhz")) if values("sm_clock_mhz") else None,
        "temperature_c": max(values("temperature_c"), default=None),
        "throttled_share": round(statistics.mean(throttled), 3),
    }
