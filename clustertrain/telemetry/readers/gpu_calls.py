"""Which call of NVML gives which figures of :mod:`.fields`, for a GPU and for a MIG slice of one.

Figures that come together are read together. What a call costs differs by a thousand times between GPUs and drivers;
``python -m benchmarks nvml_calls`` measures it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW, Pace
from clustertrain.telemetry.readers.field_values import FieldValues
from clustertrain.telemetry.readers.gpm import GRAPHICS_UTIL, METRICS, RollingPair
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError

Values = Mapping[str, float | NvmlError]
# Nothing of another kind is a reason to try the older call.
_MISSING = ("FUNCTION_NOT_FOUND", "NOT_SUPPORTED", "INVALID_ARGUMENT", "ARGUMENT_VERSION_MISMATCH")
# nvmlClocksEventReason*. Hardware slowdown is the roof over heat, the power brake and a draw that rises too fast: alone
# it is the last, or a GPU from before the finer ones.
_SW_POWER, _HW_SLOWDOWN, _SW_THERMAL, _HW_THERMAL, _POWER_BRAKE, _BOARD_LIMIT = 0x4, 0x8, 0x20, 0x40, 0x80, 0x200
_COUNTERS = ("energy_j", "pcie_tx_bytes", "pcie_rx_bytes", "nvlink_tx_bytes", "nvlink_rx_bytes")
_VOLATILE, _CORRECTED, _UNCORRECTED = 0, 0, 1


class Call(NamedTuple):
    """``read(wanted)`` returns these fields, each with its value or why there is none, or raises NvmlError for all.
    It may leave out what is not wanted."""

    fields: tuple[str, ...]
    read: Callable[[tuple[str, ...]], Values]


class _Number:
    """A figure that NVML answers with one number; the memory for it is kept."""

    def __init__(self, nvml: Nvml, function: str, *args: int, kind: type[Any] = ctypes.c_uint) -> None:
        self._nvml, self._function, self._args = nvml, function, args
        self._answer = kind()
        self._where = ctypes.byref(self._answer)

    def read(self, handle: Any) -> int:
        """Raises NvmlError where there is none."""
        self._nvml.ask(self._function, handle, *self._args, self._where)
        return int(self._answer.value)


class GpuCalls:
    """All calls for one device. ``absent`` says why a slice lacks a field, which is not asked for then."""

    def __init__(self, nvml: Nvml, device: Device) -> None:
        self._nvml = nvml
        self._uuid = device.uuid
        self._parent = device.parent
        self._rates = (ctypes.c_uint * 2)()
        self._temperature_v: Any = None
        if nvml.lib is not None:
            self._temperature_v = nvml.lib.c_nvmlTemperature_v1_t()
            self._temperature_v.version = nvml.lib.nvmlTemperature_v1
        self._temperature_1 = _Number(nvml, "nvmlDeviceGetTemperature", 0)  # NVML_TEMPERATURE_GPU
        wide = ctypes.c_ulonglong
        self._reasons = _Number(nvml, "nvmlDeviceGetCurrentClocksEventReasons", kind=wide)
        self._older_reasons = _Number(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", kind=wide)
        self._processes_call = "nvmlDeviceGetComputeRunningProcesses_v3"
        if device.parent is None:
            self._gpm = RollingPair(nvml, self._handle, self._take)
        else:
            self._gpm = RollingPair(nvml, self._board, self._take_of_slice, {"utilization": GRAPHICS_UTIL, **METRICS})
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
            Call(("memory_temperature_c", "nvlink_errors"), self._slow_fields),
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
        number = _Number(self._nvml, function, *args, kind=kind)
        return Call((field,), lambda wanted: {field: scale * number.read(self._handle())})

    def _handle(self) -> Any:
        return self._nvml.handle(self._uuid)

    def _board(self) -> Any:
        return self._nvml.handle(self._parent or self._uuid)

    def _utilization(self, wanted: tuple[str, ...]) -> Values:
        self._nvml.ask("nvmlDeviceGetUtilizationRates", self._handle(), self._rates)
        return {"utilization": self._rates[0] / 100, "memory_busy": self._rates[1] / 100}

    def _memory(self, wanted: tuple[str, ...]) -> Values:
        return {"memory_used_bytes": float(self._nvml.memory_used(self._uuid))}

    def _temperature(self, wanted: tuple[str, ...]) -> Values:
        # nvmlDeviceGetTemperature goes with CUDA 14, and is all that drivers before 570 have.
        if self._temperature_v is not None:
            try:
                self._nvml.ask("nvmlDeviceGetTemperatureV", self._handle(), ctypes.byref(self._temperature_v))
                return {"temperature_c": float(self._temperature_v.temperature)}
            except NvmlError as e:
                if e.name not in _MISSING:
                    raise
        value = self._temperature_1.read(self._handle())
        self._temperature_v = None
        return {"temperature_c": float(value)}

    def _throttling(self, wanted: tuple[str, ...]) -> Values:
        # The call of the second name goes with CUDA 14, and is all that drivers before 535 have.
        try:
            return throttling(self._reasons.read(self._handle()))
        except NvmlError as e:
            if e.name not in _MISSING or self._reasons is self._older_reasons:
                raise
        reasons = self._older_reasons.read(self._handle())
        self._reasons = self._older_reasons
        return throttling(reasons)

    def _activity(self, wanted: tuple[str, ...]) -> Values:
        return self._gpm.read()

    def _take(self, sample: Any) -> None:
        self._nvml.ask("nvmlGpmSampleGet", self._handle(), sample)

    def _take_of_slice(self, sample: Any) -> None:
        instance = self._nvml.call("nvmlDeviceGetGpuInstanceId", self._handle())
        self._nvml.call("nvmlGpmMigSampleGet", self._board(), instance, sample)

    def _fast_counters(self, wanted: tuple[str, ...]) -> Values:
        try:
            found = self._counters.read(self._handle(), wanted)
        except NvmlError as e:
            if e.name not in _MISSING:
                raise
            found = dict.fromkeys(wanted, e)
        energy = found.get("energy_j")
        if isinstance(energy, NvmlError) and energy.name in _MISSING:
            try:
                found["energy_j"] = self._nvml.call("nvmlDeviceGetTotalEnergyConsumption", self._handle()) / 1000
            except NvmlError as e:
                found["energy_j"] = e
        return found

    def _slow_fields(self, wanted: tuple[str, ...]) -> Values:
        found = self._counters.read(self._handle(), wanted)
        if found.get("memory_temperature_c") == 0.0:
            found["memory_temperature_c"] = NvmlError("NOT_SUPPORTED", "the driver says 0 °C, for want of a sensor")
        return found

    def _processes(self, wanted: tuple[str, ...]) -> Values:
        try:
            found = self._nvml.call(self._processes_call, self._handle())
        except NvmlError as e:
            older = "nvmlDeviceGetComputeRunningProcesses_v2"  # all that drivers before 510 have
            if e.name != "FUNCTION_NOT_FOUND" or self._processes_call == older:
                raise
            found = self._nvml.call(older, self._handle())
            self._processes_call = older
        return {"processes": float(len(found))}

    def _remapping(self, wanted: tuple[str, ...]) -> Values:
        corrected, uncorrected, pending, failed = self._nvml.call("nvmlDeviceGetRemappedRows", self._handle())
        return {
            "remapped_rows": float(corrected + uncorrected),
            "remap_pending": float(bool(pending)),
            "remap_failed": float(bool(failed)),
        }

    def _links(self, wanted: tuple[str, ...]) -> Values:
        states = self._nvml.link_states(self._uuid)
        if not states:
            raise NvmlError("NOT_SUPPORTED", "this GPU has no NVLink")
        return {"nvlinks_active": float(sum(states))}


def throttling(reasons: int) -> dict[str, float | NvmlError]:
    """nvmlClocksEventReasons, decoded: each 0 or 1."""
    hardware = reasons & (_POWER_BRAKE | _BOARD_LIMIT) or (reasons & _HW_SLOWDOWN and not reasons & _HW_THERMAL)
    return {
        "throttle_power": float(bool(reasons & _SW_POWER)),
        "throttle_thermal": float(bool(reasons & (_SW_THERMAL | _HW_THERMAL))),
        "throttle_hardware": float(bool(hardware)),
    }
