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
        self.lost = False
        self.fields_read: list[str] = []
        self.unsupported: dict[str, str] = {}
        self.queries = {pace: tuple(self._call(f.name) for f in fields.GPU if f.pace == pace) for pace in (FAST, SLOW)}

    def _call(self, field: str) -> Query:
        return Query((field,), lambda handle, names: (self._read(field),))

    def refresh(self) -> None:
        if self.lost:
            raise NvmlError("NOT_FOUND")

    def handle(self) -> str:
        return "handle"

    def has_handle(self) -> bool:
        return not self.lost

    def _read(self, field: str) -> float:
        self.fields_read.append(field)
        if self.lost:
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
    calls, time = FakeCalls(), Time()
    return GpuReader(Nvml(), Device("GPU-a", index=0), time, calls), calls, time


def values(gpu: GpuReader) -> list[float | None]:
    row = gpu.read()
    assert row is not None
    return row


def test_failed_field_is_none_with_reason() -> None:
    gpu, calls, _ = reader()
    calls.errors["power_w"] = "NOT_SUPPORTED"
    row = values(gpu)
    assert row[POWER] is None
    assert row.count(0.5) == len(FIELDS) - 1
    assert gpu.reasons == {"power_w": "NOT_SUPPORTED: this GPU or its driver does not support it"}


def test_failed_field_is_retried_with_backoff() -> None:
    gpu, calls, time = reader()
    calls.errors["power_w"] = "TIMEOUT"
    attempts = []
    for second in range(100):
        time.now = 1000.0 + second
        before = calls.fields_read.count("power_w")
        values(gpu)
        if calls.fields_read.count("power_w") > before:
            attempts.append(second)
    assert attempts == [0, 2, 6, 14, 30, 62]
    calls.errors.clear()
    time.now += 60
    assert values(gpu)[POWER] == 0.5
    assert gpu.reasons == {}


def test_unsupported_field_is_retried_once_per_minute() -> None:
    gpu, calls, time = reader()
    calls.errors["power_w"] = "NOT_SUPPORTED"
    for second in range(59):
        time.now = 1000.0 + second
        values(gpu)
    assert calls.fields_read.count("power_w") == 1


def test_lost_gpu_recovers() -> None:
    gpu, calls, time = reader()
    values(gpu)
    calls.lost = True
    assert gpu.read() is None
    assert str(gpu.lost_reason).startswith("GPU_IS_LOST")
    assert set(gpu.reasons) == {f.name for f in fields.GPU}
    assert gpu.read(SLOW) is None
    reads_before = len(calls.fields_read)
    time.now += 1
    assert gpu.read() is None
    assert len(calls.fields_read) == reads_before, "a lost GPU is not queried at every sample"
    calls.lost = False
    time.now += 5
    assert values(gpu) == [0.5] * len(FIELDS)
    assert (gpu.lost_reason, gpu.reasons) == (None, {})


def test_gpu_missing_at_start_is_lost() -> None:
    device = Device("missing-minor-2", reason="NOT_FOUND: no such device")
    gpu = GpuReader(Nvml(), device, Time(), FakeCalls())
    assert gpu.read() is None
    assert gpu.lost_reason == "NOT_FOUND: no such device"


def test_nvml_shutdown_requests_reopen() -> None:
    gpu, calls, _ = reader()
    calls.errors["utilization"] = "UNINITIALIZED"
    values(gpu)
    assert gpu.needs_reopen
    calls.errors.clear()
    gpu.on_reopen()
    assert not gpu.needs_reopen
    assert values(gpu) == [0.5] * len(FIELDS)


def test_field_without_data_is_retried_next_tick() -> None:
    gpu, calls, time = reader()
    calls.errors["sm_activity"] = "NO_DATA"
    values(gpu)
    assert gpu.reasons["sm_activity"].startswith("NO_DATA")
    calls.errors.clear()
    time.now += 1
    values(gpu)
    assert gpu.reasons == {}


def test_fast_and_slow_fields_have_separate_paces() -> None:
    gpu, calls, _ = reader()
    values(gpu)
    slow = {f.name for f in fields.GPU if f.pace == SLOW}
    assert not slow & set(calls.fields_read)
    row = gpu.read(SLOW)
    assert row == [0.5] * len(slow)
    assert slow <= set(calls.fields_read)
