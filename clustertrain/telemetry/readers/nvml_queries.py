"""Which call of NVML gives which figures of :mod:`.fields`, for a GPU and for a MIG slice of one.

Figures that come together are read together. What a call costs differs by a thousand times between GPUs and drivers;
``python -m benchmarks nvml_calls`` measures it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW, Pace
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError
from clustertrain.telemetry.readers.nvml_field_values import FieldValues
from clustertrain.telemetry.readers.nvml_gpm import GRAPHICS_UTIL, METRICS, RollingPair

Values = Sequence[float | NvmlError]
# Nothing of another kind is a reason to try the older call.
_MISSING = ("FUNCTION_NOT_FOUND", "NOT_SUPPORTED", "INVALID_ARGUMENT", "ARGUMENT_VERSION_MISMATCH")
# nvmlClocksEventReason*. Hardware slowdown is the roof over heat, the power brake and a draw that rises too fast: alone
# it is the last, or a GPU from before the finer ones.
_SW_POWER, _HW_SLOWDOWN, _SW_THERMAL, _HW_THERMAL, _POWER_BRAKE, _BOARD_LIMIT = 0x4, 0x8, 0x20, 0x40, 0x80, 0x200
_COUNTERS = ("energy_j", "pcie_tx_bytes", "pcie_rx_bytes", "nvlink_tx_bytes", "nvlink_rx_bytes")
_SLOW_FIELDS = ("memory_temperature_c", "nvlink_errors")
_VOLATILE, _CORRECTED, _UNCORRECTED = 0, 0, 1
_PROCESS_BYTES = 24  # nvmlProcessInfo_v2_t
_TOO_SMALL = 7  # nvmlReturn_t: the list has no room for all
_SENSOR_GPU = 0  # NVML_TEMPERATURE_GPU
_NAN = float("nan")


class Call(NamedTuple):
    """``read(handle, wanted)`` returns of each of ``fields``, in their order, the value or why there is none, or raises
    NvmlError for all. What is not wanted need not be asked for: anything may stand in its place."""

    fields: tuple[str, ...]
    read: Callable[[Any, tuple[str, ...]], Values]


class _Number:
    """A figure that NVML answers with one number, times ``scale``; the memory for it is kept.

    Args:
        args: of the function, between the handle and the answer.
        kind: of the answer.
    """

    def __init__(
        self, nvml: Nvml, function: str, *args: int, scale: float = 1.0, kind: type[Any] = ctypes.c_uint
    ) -> None:
        self._error, self._function, self._scale = nvml.error, nvml.function(function), scale
        self._answer = kind()
        self._args = (*args, ctypes.byref(self._answer))

    def read(self, handle: Any, wanted: tuple[str, ...] = ()) -> tuple[float]:
        """Raises NvmlError where there is none."""
        code = self._function(handle, *self._args)
        if code:
            raise self._error(code)
        return (self._scale * self._answer.value,)


class GpuCalls:
    """All calls for one device. ``absent`` says why a slice lacks a field, which is not asked for then."""

    def __init__(self, nvml: Nvml, device: Device) -> None:
        self._nvml = nvml
        self._uuid = device.uuid
        self._parent = device.parent
        self._rates_of, self._rates = nvml.function("nvmlDeviceGetUtilizationRates"), (ctypes.c_uint * 2)()
        self._temperature_v: ctypes.Array[Any] | None = None  # nvmlTemperature_v1_t: version, sensor, °C
        if nvml.lib is not None:
            self._temperature_v = (ctypes.c_int * 3)(nvml.lib.nvmlTemperature_v1, _SENSOR_GPU, 0)
        self._temperature_of = nvml.function("nvmlDeviceGetTemperatureV")
        self._temperature_1 = _Number(nvml, "nvmlDeviceGetTemperature", _SENSOR_GPU)
        wide = ctypes.c_ulonglong
        self._reasons = _Number(nvml, "nvmlDeviceGetCurrentClocksEventReasons", scale=1, kind=wide)
        self._older_reasons = _Number(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", scale=1, kind=wide)
        self._processes_of = nvml.function("nvmlDeviceGetComputeRunningProcesses_v3")
        self._process_count = ctypes.c_uint()
        self._process_list = ctypes.create_string_buffer(_PROCESS_BYTES * 16)
        if device.parent is None:
            self._gpm = RollingPair(nvml)
        else:
            self._gpm = RollingPair(nvml, {"utilization": GRAPHICS_UTIL, **METRICS}, self._take_of_slice, self._board)
        self._counters = FieldValues(nvml)
        self.calls: dict[Pace, tuple[Call, ...]] = self._of_slice() if device.parent else self._of_gpu()
        there = {name for calls in self.calls.values() for call in calls for name in call.fields}
        why = NvmlError("NOT_SUPPORTED", "NVML tells it of whole GPUs, and this is a MIG slice of one").reason
        self.absent = {f.name: why for f in fields.GPU if f.name not in there}

    def find(self) -> None:
        """Look the device up anew.

        Raises:
            NvmlError: it cannot be reached.
        """
        self._counters.forget()
        self._gpm.restart()
        self._nvml.find(self._uuid)

    def handle(self) -> Any:
        """What the calls take; found anew where NVML was opened again.

        Raises:
            NvmlError: it cannot be reached.
        """
        return self._nvml.handles[self._uuid]

    def holds(self) -> bool:
        return self._nvml.holds(self._uuid)

    def _of_gpu(self) -> dict[Pace, tuple[Call, ...]]:
        fast = (
            Call(("utilization", "memory_busy"), self._utilization),
            Call(("memory_used_bytes",), self._memory),
            self._simple("power_w", "nvmlDeviceGetPowerUsage", scale=1e-3),
            Call(("temperature_c",), self._temperature),
            self._simple("sm_clock_mhz", "nvmlDeviceGetClockInfo", 1),  # NVML_CLOCK_SM
            self._simple("memory_clock_mhz", "nvmlDeviceGetClockInfo", 2),  # NVML_CLOCK_MEM
            Call(("throttle_power", "throttle_thermal", "throttle_hardware"), self._throttling),
            Call(tuple(METRICS), self._activity),
            Call(_COUNTERS, self._fast_counters),
        )
        errors, wide = "nvmlDeviceGetTotalEccErrors", ctypes.c_ulonglong
        slow = (
            Call(("processes",), self._processes),
            Call(_SLOW_FIELDS, self._slow_fields),
            self._simple("ecc_corrected", errors, _CORRECTED, _VOLATILE, kind=wide),
            self._simple("ecc_uncorrected", errors, _UNCORRECTED, _VOLATILE, kind=wide),
            Call(("remapped_rows", "remap_pending", "remap_failed"), self._remapping),
            Call(("nvlinks_active",), self._links),
            self._simple("pcie_replays", "nvmlDeviceGetPcieReplayCounter"),
        )
        return {FAST: fast, SLOW: slow}

    def _of_slice(self) -> dict[Pace, tuple[Call, ...]]:
        # The other figures are of the whole board, which slices of other jobs share.
        fast = (Call(("memory_used_bytes",), self._memory), Call(("utilization", *METRICS), self._activity))
        return {FAST: fast, SLOW: (Call(("processes",), self._processes),)}

    def _simple(
        self, field: str, function: str, *args: int, scale: float = 1.0, kind: type[Any] = ctypes.c_uint
    ) -> Call:
        return Call((field,), _Number(self._nvml, function, *args, scale=scale, kind=kind).read)

    def _board(self) -> Any:
        return self._nvml.handles[self._parent or self._uuid]

    def _utilization(self, handle: Any, wanted: tuple[str, ...]) -> Values:
        code = self._rates_of(handle, self._rates)
        if code:
            raise self._nvml.error(code)
        return self._rates[0] / 100, self._rates[1] / 100

    def _memory(self, handle: Any, wanted: tuple[str, ...]) -> Values:
        return (float(self._nvml.memory(self._uuid, handle).used),)

    def _temperature(self, handle: Any, wanted: tuple[str, ...]) -> Values:
        # nvmlDeviceGetTemperature goes with CUDA 14, and is all that drivers before 570 have.
        if self._temperature_v is not None:
            code = self._temperature_of(handle, self._temperature_v)
            if not code:
                return (float(self._temperature_v[2]),)
            error = self._nvml.error(code)
            if error.name not in _MISSING:
                raise error
        value = self._temperature_1.read(handle)
        self._temperature_v = None
        return value

    def _throttling(self, handle: Any, wanted: tuple[str, ...]) -> Values:
        # The call of the second name goes with CUDA 14, and is all that drivers before 535 have.
        try:
            return throttling(int(self._reasons.read(handle)[0]))
        except NvmlError as e:
            if e.name not in _MISSING or self._reasons is self._older_reasons:
                raise
        (reasons,) = self._older_reasons.read(handle)
        self._reasons = self._older_reasons
        return throttling(int(reasons))

    def _activity(self, handle: Any, wanted: tuple[str, ...]) -> Values:
        return self._gpm.read(handle)

    def _take_of_slice(self, handle: Any, sample: Any) -> int:
        instance = self._nvml.call("nvmlDeviceGetGpuInstanceId", handle)
        return self._nvml.function("nvmlGpmMigSampleGet")(self._board(), instance, sample)

    def _fast_counters(self, handle: Any, wanted: tuple[str, ...]) -> Values:
        found: list[float | NvmlError]
        try:
            found = self._counters.read(handle, wanted)
        except NvmlError as e:
            if e.name not in _MISSING:
                raise
            found = [e] * len(wanted)
        if wanted[0] == "energy_j" and isinstance(found[0], NvmlError) and found[0].name in _MISSING:
            try:
                found[0] = self._nvml.call("nvmlDeviceGetTotalEnergyConsumption", handle) / 1000
            except NvmlError as e:
                found[0] = e
        return _in_place(_COUNTERS, wanted, found)

    def _slow_fields(self, handle: Any, wanted: tuple[str, ...]) -> Values:
        found = self._counters.read(handle, wanted)
        if wanted[0] == "memory_temperature_c" and found[0] == 0.0:
            found[0] = NvmlError("NOT_SUPPORTED", "the driver says 0 °C, for want of a sensor")
        return _in_place(_SLOW_FIELDS, wanted, found)

    def _processes(self, handle: Any, wanted: tuple[str, ...]) -> Values:
        code = self._list_processes(handle)
        if code and self._nvml.error(code).name == "FUNCTION_NOT_FOUND":
            self._processes_of = self._nvml.function("nvmlDeviceGetComputeRunningProcesses_v2")  # before driver 510
            code = self._list_processes(handle)
        if code:
            raise self._nvml.error(code)
        return (float(self._process_count.value),)

    def _list_processes(self, handle: Any) -> int:
        """NVML's code; their number is then in ``_process_count``."""
        count = self._process_count
        for _ in range(2):
            count.value = len(self._process_list) // _PROCESS_BYTES
            code = self._processes_of(handle, ctypes.byref(count), self._process_list)
            if code != _TOO_SMALL:
                break
            self._process_list = ctypes.create_string_buffer(_PROCESS_BYTES * (2 * count.value + 5))
        return code

    def _remapping(self, handle: Any, wanted: tuple[str, ...]) -> Values:
        corrected, uncorrected, pending, failed = self._nvml.call("nvmlDeviceGetRemappedRows", handle)
        return float(corrected + uncorrected), float(bool(pending)), float(bool(failed))

    def _links(self, handle: Any, wanted: tuple[str, ...]) -> Values:
        states = self._nvml.link_states(self._uuid)
        if not states:
            raise NvmlError("NOT_SUPPORTED", "this GPU has no NVLink")
        return (float(sum(states)),)


def _in_place(fields: tuple[str, ...], wanted: tuple[str, ...], values: list[float | NvmlError]) -> Values:
    """The values of those wanted in the order of all fields."""
    if wanted == fields:
        return values
    found = dict(zip(wanted, values, strict=True))
    return [found.get(field, _NAN) for field in fields]


def throttling(reasons: int) -> tuple[float, float, float]:
    """nvmlClocksEventReasons, decoded: by power, by heat, by the hardware, each 0 or 1."""
    hardware = reasons & (_POWER_BRAKE | _BOARD_LIMIT) or (reasons & _HW_SLOWDOWN and not reasons & _HW_THERMAL)
    return (
        float(bool(reasons & _SW_POWER)),
        float(bool(reasons & (_SW_THERMAL | _HW_THERMAL))),
        float(bool(hardware)),
    )
