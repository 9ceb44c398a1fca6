"""Clocks, power and temperature of the GPUs while the parts run: a line of JSON per GPU and second."""

from __future__ import annotations

import json
import math
import os
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

    @staticmethod
    def _read(reader: GpuReader) -> dict[str, Any]:
        row = reader.read(fields.FAST)
        if row is None:
            return {"uuid": reader.device.uuid, "lost": reader.lost_reason}
        values = dict(zip(_FAST, row, strict=True))
        return {"uuid": reader.device.uuid, **{name: values[name] for name in RECORDED}}
