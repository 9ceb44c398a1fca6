"""Run the steps from standard input on all devices of the stub; print the result of each step as JSON.

A step is a list: ``["devices"]``, ``["read", PACE]``, ``["read-until", FIELD]`` (of the first device, for fields that
need two samples), ``["wait", S]`` (the readers' clock only), ``["drive", TEXT]``, ``["drive", TEXT, T]`` (as if the
load had run for T seconds), ``["listen"]``, ``["poll"]``, ``["session"]``, ``["reopen"]``, ``["close"]``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import clock
from clustertrain.telemetry import fields
from clustertrain.telemetry.readers.allocation import find_allocation
from clustertrain.telemetry.readers.gpu_reader import GpuReader
from clustertrain.telemetry.readers.nvml import Nvml, NvmlError
from clustertrain.telemetry.readers.nvml_events import GpuEvents


def drive(text: str, load_age_s: float | None = None) -> None:
    """Replace the stub's driving file."""
    start = "" if load_age_s is None else f"start {clock.now() - load_age_s}\n"
    path = Path(os.environ["NVML_STUB_FILE"])
    path.with_suffix(".new").write_text(start + text)
    path.with_suffix(".new").replace(path)


class Child:
    def __init__(self) -> None:
        self.now = 1000.0
        self.nvml = Nvml()
        self.driver = self.nvml.open()
        self.devices = self.nvml.devices()
        self.allocated = find_allocation(os.environ, self.devices).devices
        self.readers = [GpuReader(self.nvml, d, lambda: self.now) for d in self.allocated]
        self.events = GpuEvents(self.nvml, self.allocated)

    def read(self, pace: fields.Pace = fields.FAST) -> dict[str, Any]:
        """Return by UUID each field's value or the reason why it is missing; for a lost device, only the reason."""
        names = [f.name for f in fields.GPU if f.pace == pace]
        values: dict[str, Any] = {}
        for reader in self.readers:
            row = reader.read(pace)
            if row is None:
                values[reader.device.uuid] = f"lost: {reader.lost_reason}"
                continue
            pairs = zip(names, row, strict=True)
            values[reader.device.uuid] = {n: reader.reasons.get(n) if v is None else v for n, v in pairs}
        return values

    def step(self, action: str, *args: Any) -> Any:
        match action:
            case "devices":
                return {"driver": self.driver, "devices": [msgspec.to_builtins(d) for d in self.devices]}
            case "read":
                return self.read(*args)
            case "read-until":
                clock.wait_until(lambda: isinstance(next(iter(self.read().values()))[args[0]], float), 30, 0.02)
                return self.read()
            case "wait":
                self.now += args[0]
            case "drive":
                drive(*args)
            case "listen":
                self.events.open()
                return self.events.reasons
            case "poll":
                return [*map(msgspec.to_builtins, self.events.poll()), self.events.reasons]
            case "session":
                return [r.needs_reopen for r in self.readers]
            case "reopen":
                self.nvml.close()
                self.nvml.open()
                for reader in self.readers:
                    reader.on_reopen()
            case "close":
                self.nvml.close()
                return ctypes.CDLL("libnvidia-ml.so.1").nvml_stub_live_samples()
            case _:
                raise ValueError(action)
        return None


def main() -> None:
    try:
        child = Child()
    except NvmlError as e:
        print(json.dumps({"error": e.reason}))
        return
    print(json.dumps([child.step(*step) for step in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
