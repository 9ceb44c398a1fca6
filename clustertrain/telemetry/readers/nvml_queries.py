"""NVML calls that provide the fields of :mod:`.fields`, for a GPU and for a MIG slice.

One call may provide several fields. Its cost differs by a factor of 1000 between GPUs and drivers;
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
from clustertrain.telemetry.readers.nvml_gpm import GRAPHICS_UTIL, METRICS, GpmSampler

Values = Sequence[float | NvmlError]
# Only these errors are a reason to try the older call.
_UNSUPPORTED_ERRORS = ("FUNCTION_NOT_FOUND", "NOT_SUPPORTED", "INVALID_ARGUMENT", "ARGUMENT_VERSION_MISMATCH")
# nvmlClocksEventReason*. Hardware slowdown covers heat, the power brake and power that rises too fast. Without a finer
# reason it means the last of these, or an older GPU that has no finer reasons.
_SW_POWER, _HW_SLOWDOWN, _SW_THERMAL, _HW_THERMAL, _POWER_BRAKE, _BOARD_LIMIT = 0x4, 0x8, 0x20, 0x40, 0x80, 0x200
_COUNTER_FIELDS = ("energy_j", "pcie_tx_bytes", "pcie_rx_bytes", "nvlink_tx_bytes", "nvlink_rx_bytes")
_SLOW_FIELDS = ("memory_temperature_c", "nvlink_errors")
_RETIREMENT_FIELDS = ("remapped_rows", "remap_pending")
_VOLATILE, _CORRECTED, _UNCORRECTED = 0, 0, 1
_PROCESS_BYTES = 24  # nvmlProcessInfo_v2_t
_INSUFFICIENT_SIZE = 7  # nvmlReturn_t: the list is too short
_SENSOR_GPU = 0  # NVML_TEMPERATURE_GPU
_NAN = float("nan")


class Query(NamedTuple):
    """One NVML call and the fields it provides.

    ``read(handle, requested)`` returns a value or an NvmlError for each of ``fields``, in their order, or raises
    NvmlError for all of them. The result for a field that is not requested is undefined.
    """

    fields: tuple[str, ...]
    read: Callable[[object, tuple[str, ...]], Values]


class _ScalarQuery:
    """NVML function that returns one number, into a reused buffer.

    Args:
        function: name of the C function.
        args: its arguments between the handle and the result pointer.
        scale: factor for the result.
        ctype: type of the result.
    """

    def __init__(
        self, nvml: Nvml, function: str, *args: int, scale: float = 1.0, ctype: type[Any] = ctypes.c_uint
    ) -> None:
        self._error, self._function, self._scale = nvml.error, nvml.function(function), scale
        self._value = ctype()
        self._args = (*args, ctypes.byref(self._value))

    def read(self, handle: object, requested: tuple[str, ...] = ()) -> tuple[float]:
        """Return the scaled number; raise NvmlError if NVML has none."""
        code = self._function(handle, *self._args)
        if code:
            raise self._error(code)
        return (self._scale * self._value.value,)


class GpuQueries:
    """All NVML calls for one device. ``unsupported`` holds, by field, why a MIG slice lacks it."""

    def __init__(self, nvml: Nvml, device: Device) -> None:
        self._nvml = nvml
        self._uuid = device.uuid
        self._parent = device.parent
        self._get_utilization_rates, self._utilization_rates = (
            nvml.function("nvmlDeviceGetUtilizationRates"),
            (ctypes.c_uint * 2)(),
        )
        self._temperature_v1: ctypes.Array[Any] | None = None  # nvmlTemperature_v1_t: version, sensor, °C
        if nvml.lib is not None:
            self._temperature_v1 = (ctypes.c_int * 3)(nvml.lib.nvmlTemperature_v1, _SENSOR_GPU, 0)
        self._get_temperature_v = nvml.function("nvmlDeviceGetTemperatureV")
        self._older_temperature = _ScalarQuery(nvml, "nvmlDeviceGetTemperature", _SENSOR_GPU)
        u64 = ctypes.c_ulonglong
        self._clock_event_reasons = _ScalarQuery(nvml, "nvmlDeviceGetCurrentClocksEventReasons", scale=1, ctype=u64)
        self._throttle_reasons = _ScalarQuery(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", scale=1, ctype=u64)
        self._get_processes = nvml.function("nvmlDeviceGetComputeRunningProcesses_v3")
        self._process_count = ctypes.c_uint()
        self._process_list = ctypes.create_string_buffer(_PROCESS_BYTES * 16)
        if device.parent is None:
            self._gpm = GpmSampler(nvml)
        else:
            self._gpm = GpmSampler(
                nvml, {"utilization": GRAPHICS_UTIL, **METRICS}, self._sample_get_mig, self._parent_handle
            )
        self._counters = FieldValues(nvml)
        self.queries: dict[Pace, tuple[Query, ...]] = self._mig_queries() if device.parent else self._gpu_queries()
        supported = {name for calls in self.queries.values() for call in calls for name in call.fields}
        reason = NvmlError("NOT_SUPPORTED", "NVML reports it only for whole GPUs, and this is a MIG slice").reason
        self.unsupported = {f.name: reason for f in fields.GPU if f.name not in supported}

    def refresh(self) -> None:
        """Look up the device again.

        Raises:
            NvmlError: the device cannot be reached.
        """
        self._counters.reset()
        self._gpm.reset()
        self._nvml.refresh_handle(self._uuid)

    def handle(self) -> object:
        """Return the NVML handle, looked up again if NVML was reopened.

        Raises:
            NvmlError: the device cannot be reached.
        """
        return self._nvml.handles[self._uuid]

    def has_handle(self) -> bool:
        return self._nvml.has_handle(self._uuid)

    def _gpu_queries(self) -> dict[Pace, tuple[Query, ...]]:
        fast = (
            Query(("utilization", "memory_busy"), self._utilization),
            Query(("memory_used_bytes",), self._memory),
            self._scalar_query("power_w", "nvmlDeviceGetPowerUsage", scale=1e-3),
            Query(("temperature_c",), self._temperature),
            self._scalar_query("sm_clock_mhz", "nvmlDeviceGetClockInfo", 1),  # NVML_CLOCK_SM
            self._scalar_query("memory_clock_mhz", "nvmlDeviceGetClockInfo", 2),  # NVML_CLOCK_MEM
            Query(("throttle_power", "throttle_thermal", "throttle_hardware"), self._throttling),
            Query(tuple(METRICS), self._activity),
            Query(_COUNTER_FIELDS, self._fast_counters),
        )
        ecc_function, u64 = "nvmlDeviceGetTotalEccErrors", ctypes.c_ulonglong
        slow = (
            Query(("processes",), self._processes),
            Query(_SLOW_FIELDS, self._slow_fields),
            self._scalar_query("ecc_corrected", ecc_function, _CORRECTED, _VOLATILE, ctype=u64),
            self._scalar_query("ecc_uncorrected", ecc_function, _UNCORRECTED, _VOLATILE, ctype=u64),
            Query((*_RETIREMENT_FIELDS, "remap_failed"), self._remapping),
            Query(("nvlinks_active",), self._links),
            self._scalar_query("pcie_replays", "nvmlDeviceGetPcieReplayCounter"),
        )
        return {FAST: fast, SLOW: slow}

    def _mig_queries(self) -> dict[Pace, tuple[Query, ...]]:
        # The other figures are of the whole board, which slices of other jobs share.
        fast = (Query(("memory_used_bytes",), self._memory), Query(("utilization", *METRICS), self._activity))
        return {FAST: fast, SLOW: (Query(("processes",), self._processes),)}

    def _scalar_query(
        self, field: str, function: str, *args: int, scale: float = 1.0, ctype: type[Any] = ctypes.c_uint
    ) -> Query:
        return Query((field,), _ScalarQuery(self._nvml, function, *args, scale=scale, ctype=ctype).read)

    def _parent_handle(self) -> object:
        return self._nvml.handles[self._parent or self._uuid]

    def _utilization(self, handle: object, requested: tuple[str, ...]) -> Values:
        code = self._get_utilization_rates(handle, self._utilization_rates)
        if code:
            raise self._nvml.error(code)
        return self._utilization_rates[0] / 100, self._utilization_rates[1] / 100

    def _memory(self, handle: object, requested: tuple[str, ...]) -> Values:
        return (float(self._nvml.read_memory(self._uuid, handle).used),)

    def _temperature(self, handle: object, requested: tuple[str, ...]) -> Values:
        # CUDA 14 removes nvmlDeviceGetTemperature; drivers before 570 have nothing else.
        if self._temperature_v1 is not None:
            code = self._get_temperature_v(handle, self._temperature_v1)
            if not code:
                return (float(self._temperature_v1[2]),)
            error = self._nvml.error(code)
            if error.name not in _UNSUPPORTED_ERRORS:
                raise error
        value = self._older_temperature.read(handle)
        self._temperature_v1 = None
        return value

    def _throttling(self, handle: object, requested: tuple[str, ...]) -> Values:
        # CUDA 14 removes the call by the old name (ThrottleReasons); drivers before 535 have nothing else.
        try:
            return decode_throttle_reasons(int(self._clock_event_reasons.read(handle)[0]))
        except NvmlError as e:
            if e.name not in _UNSUPPORTED_ERRORS or self._clock_event_reasons is self._throttle_reasons:
                raise
        (reasons,) = self._throttle_reasons.read(handle)
        self._clock_event_reasons = self._throttle_reasons
        return decode_throttle_reasons(int(reasons))

    def _activity(self, handle: object, requested: tuple[str, ...]) -> Values:
        return self._gpm.read(handle)

    def _sample_get_mig(self, handle: object, sample: object) -> int:
        instance = self._nvml.call("nvmlDeviceGetGpuInstanceId", handle)
        return self._nvml.function("nvmlGpmMigSampleGet")(self._parent_handle(), instance, sample)

    def _fast_counters(self, handle: object, requested: tuple[str, ...]) -> Values:
        values: list[float | NvmlError]
        try:
            values = self._counters.read(handle, requested)
        except NvmlError as e:
            if e.name not in _UNSUPPORTED_ERRORS:
                raise
            values = [e] * len(requested)
        if requested[0] == "energy_j" and isinstance(values[0], NvmlError) and values[0].name in _UNSUPPORTED_ERRORS:
            try:
                values[0] = self._nvml.call("nvmlDeviceGetTotalEnergyConsumption", handle) / 1000
            except NvmlError as e:
                values[0] = e
        return _align(_COUNTER_FIELDS, requested, values)

    def _slow_fields(self, handle: object, requested: tuple[str, ...]) -> Values:
        values = self._counters.read(handle, requested)
        if requested[0] == "memory_temperature_c" and values[0] == 0.0:
            values[0] = NvmlError("NOT_SUPPORTED", "the driver returned 0 °C because there is no sensor")
        return _align(_SLOW_FIELDS, requested, values)

    def _processes(self, handle: object, requested: tuple[str, ...]) -> Values:
        code = self._list_processes(handle)
        if code and self._nvml.error(code).name == "FUNCTION_NOT_FOUND":
            self._get_processes = self._nvml.function("nvmlDeviceGetComputeRunningProcesses_v2")  # before driver 535
            code = self._list_processes(handle)
        if code:
            raise self._nvml.error(code)
        return (float(self._process_count.value),)

    def _list_processes(self, handle: object) -> int:
        """Store the number of processes in ``_process_count`` and return NVML's code."""
        count = self._process_count
        for _ in range(2):
            count.value = len(self._process_list) // _PROCESS_BYTES
            code = self._get_processes(handle, ctypes.byref(count), self._process_list)
            if code != _INSUFFICIENT_SIZE:
                break
            self._process_list = ctypes.create_string_buffer(_PROCESS_BYTES * (2 * count.value + 5))
        return code

    def _remapping(self, handle: object, requested: tuple[str, ...]) -> Values:
        try:
            corrected, uncorrected, pending, failed = self._nvml.call("nvmlDeviceGetRemappedRows", handle)
        except NvmlError as e:
            if e.name != "NOT_SUPPORTED":
                raise
            return [*self._counters.read(handle, _RETIREMENT_FIELDS), e]
        return float(corrected + uncorrected), float(bool(pending)), float(bool(failed))

    def _links(self, handle: object, requested: tuple[str, ...]) -> Values:
        states = self._nvml.link_states(self._uuid)
        if not states:
            raise NvmlError("NOT_SUPPORTED", "this GPU has no NVLink")
        return (float(sum(states)),)


def _align(fields: tuple[str, ...], requested: tuple[str, ...], values: list[float | NvmlError]) -> Values:
    """Return the values of the requested fields in the order of all fields, NaN for the others."""
    if requested == fields:
        return values
    value_by_field = dict(zip(requested, values, strict=True))
    return [value_by_field.get(field, _NAN) for field in fields]


def decode_throttle_reasons(reasons: int) -> tuple[float, float, float]:
    """Decode nvmlClocksEventReasons into throttling by power, by heat and by hardware, each 0 or 1."""
    hardware = reasons & (_POWER_BRAKE | _BOARD_LIMIT) or (reasons & _HW_SLOWDOWN and not reasons & _HW_THERMAL)
    return (
        float(bool(reasons & _SW_POWER)),
        float(bool(reasons & (_SW_THERMAL | _HW_THERMAL))),
        float(bool(hardware)),
    )
