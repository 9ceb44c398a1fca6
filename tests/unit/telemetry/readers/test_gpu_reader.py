from __future__ import annotations

from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW
from clustertrain.telemetry.readers.gpu_reader import GpuReader
from clustertrain.telemetry.readers.nvml import FIELDS, Device, Nvml, NvmlError
from clustertrain.telemetry.readers.nvml_queries import Query

POWER = FIELDS.index("power_w")


class FakeCalls:
    """Queries with one call per field; ``errors`` holds the fields that fail."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self.gone = False
        self.asked: list[str] = []
        self.unsupported: dict[str, str] = {}
        self.queries = {pace: tuple(self._call(f.name) for f in fields.GPU if f.pace == pace) for pace in (FAST, SLOW)}

    def _call(self, field: str) -> Query:
        return Query((field,), lambda handle, wanted: (self._read(field),))

    def refresh(self) -> None:
        if self.gone:
            raise NvmlError("NOT_FOUND")

    def handle(self) -> str:
        return "handle"

    def has_handle(self) -> bool:
        return not self.gone

    def _read(self, field: str) -> float:
        self.asked.append(field)
        if self.gone:
            raise NvmlError("GPU_IS_LOST")
        if field in self.errors:
            raise NvmlError(self.errors[field])
        return 0.5


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def reader() -> tuple[GpuReader, FakeCalls, Time]:
    door, time = FakeCalls(), Time()
    return GpuReader(Nvml(), Device("GPU-a", index=0), time, door), door, time


def values(gpu: GpuReader) -> list[float | None]:
    found = gpu.read()
    assert found is not None
    return found


def test_failed_field_is_none_with_reason() -> None:
    gpu, door, _ = reader()
    door.errors["power_w"] = "NOT_SUPPORTED"
    found = values(gpu)
    assert found[POWER] is None
    assert found.count(0.5) == len(FIELDS) - 1
    assert gpu.reasons == {"power_w": "NOT_SUPPORTED: this GPU or its driver does not support it"}


def test_failed_field_is_retried_with_backoff() -> None:
    gpu, door, time = reader()
    door.errors["power_w"] = "TIMEOUT"
    tries = []
    for second in range(100):
        time.now = 1000.0 + second
        before = door.asked.count("power_w")
        values(gpu)
        if door.asked.count("power_w") > before:
            tries.append(second)
    assert tries == [0, 2, 6, 14, 30, 62]
    door.errors.clear()
    time.now += 60
    assert values(gpu)[POWER] == 0.5
    assert gpu.reasons == {}


def test_unsupported_field_is_retried_once_per_minute() -> None:
    gpu, door, time = reader()
    door.errors["power_w"] = "NOT_SUPPORTED"
    for second in range(59):
        time.now = 1000.0 + second
        values(gpu)
    assert door.asked.count("power_w") == 1


def test_lost_gpu_recovers() -> None:
    gpu, door, time = reader()
    values(gpu)
    door.gone = True
    assert gpu.read() is None
    assert str(gpu.lost_reason).startswith("GPU_IS_LOST")
    assert set(gpu.reasons) == {f.name for f in fields.GPU}
    assert gpu.read(SLOW) is None
    calls = len(door.asked)
    time.now += 1
    assert gpu.read() is None
    assert len(door.asked) == calls, "a lost GPU is not queried at every sample"
    door.gone = False
    time.now += 5
    assert values(gpu) == [0.5] * len(FIELDS)
    assert (gpu.lost_reason, gpu.reasons) == (None, {})


def test_gpu_missing_at_start_is_lost() -> None:
    device = Device("missing-minor-2", reason="NOT_FOUND: no such device")
    gpu = GpuReader(Nvml(), device, Time(), FakeCalls())
    assert gpu.read() is None
    assert gpu.lost_reason == "NOT_FOUND: no such device"


def test_nvml_shutdown_requests_reopen() -> None:
    gpu, door, _ = reader()
    door.errors["utilization"] = "UNINITIALIZED"
    values(gpu)
    assert gpu.needs_reopen
    door.errors.clear()
    gpu.on_reopen()
    assert not gpu.needs_reopen
    assert values(gpu) == [0.5] * len(FIELDS)


def test_field_without_data_is_retried_next_tick() -> None:
    gpu, door, time = reader()
    door.errors["sm_activity"] = "NO_DATA"
    values(gpu)
    assert gpu.reasons["sm_activity"].startswith("NO_DATA")
    door.errors.clear()
    time.now += 1
    values(gpu)
    assert gpu.reasons == {}


def test_fast_and_slow_fields_have_separate_paces() -> None:
    gpu, door, _ = reader()
    values(gpu)
    slow = {f.name for f in fields.GPU if f.pace == SLOW}
    assert not slow & set(door.asked)
    found = gpu.read(SLOW)
    assert found == [0.5] * len(slow)
    assert slow <= set(door.asked)
