"""NVML error events: XIDs and ECC errors.

The sampler's thread polls for them with a zero timeout, and NVML queues events between ticks. A separate thread would
only give more exact times, and would have to be interrupted inside the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from clustertrain import clock
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError

GpuEventType = Literal["xid", "ecc_corrected", "ecc_uncorrected"]

# nvmlEventType*
_EVENT_TYPES: dict[int, GpuEventType] = {0x1: "ecc_corrected", 0x2: "ecc_uncorrected", 0x8: "xid"}
_EVENT_MASK = 0x1 | 0x2 | 0x8
_TIMEOUT = 10  # nvmlReturn_t: no event
REPORT_INTERVAL_S = 60.0
_LOST_ERRORS = ("GPU_IS_LOST", "RESET_REQUIRED")
_WHOLE_GPU = 0xFFFFFFFF  # GPU instance id of an event that does not concern a single MIG slice
_MAX_EVENTS_PER_POLL = 1000  # a storm of ECC errors must not delay samples; the rest stays queued


class GpuError(msgspec.Struct, frozen=True):
    """Occurrences of one error on one device since the last poll."""

    t: float  # UTC epoch s of the poll, at most one tick late
    uuid: str
    kind: GpuEventType
    xid: int | None  # None for ECC errors
    count: int


class GpuEvents:
    """Error events of the job's devices; events of a board in MIG mode are attributed to the affected slices.

    ``reasons`` holds, by UUID, why a device reports no events.
    """

    def __init__(self, nvml: Nvml, devices: Sequence[Device], now: Callable[[], float] = clock.now) -> None:
        self._nvml = nvml
        self._devices = [d for d in devices if d.reason is None]
        self._now = now
        self._event_set: Any = None
        self._event_data: Any = None
        self._event_set_wait: Callable[..., int] = nvml.function("nvmlEventSetWait_v2")
        self._registered = False
        self._boards_by_handle: dict[int, str] = {}
        self._mig_slices: dict[str, list[tuple[int | None, str]]] = {}
        self.reasons: dict[str, str] = {}

    def open(self) -> None:
        """Subscribe to events; call it again after NVML was reopened or a device was lost or returned.

        Events queued before the call are dropped.
        """
        self._register_all(set())

    def _register_all(self, lost: set[str]) -> None:
        """Subscribe to the events of all boards except the lost ones."""
        self._release()
        self.reasons = {}
        try:
            self._event_set = self._nvml.call("nvmlEventSetCreate")
        except NvmlError as e:
            self.reasons = {d.uuid: e.reason for d in self._devices}
            return
        self._event_data = self._nvml.lib.c_nvmlEventData_t()
        self._event_set_wait = self._nvml.function("nvmlEventSetWait_v2")
        if not self._registered:
            self._registered = True
            self._nvml.before_close(self._on_nvml_close)
        for board in dict.fromkeys(d.parent or d.uuid for d in self._devices):
            try:
                if board in lost:
                    raise NvmlError("GPU_IS_LOST")
                self._register(board)
            except NvmlError as e:
                self.reasons |= {d.uuid: e.reason for d in self._devices if board in (d.uuid, d.parent)}

    def poll(self) -> list[GpuError]:
        """Return the events since the last poll; unsubscribe from boards that no longer respond."""
        if not self._boards_by_handle:
            return []
        counts: dict[tuple[str, GpuEventType, int | None], int] = {}
        data = self._event_data
        for _ in range(_MAX_EVENTS_PER_POLL):
            code = self._event_set_wait(self._event_set, ctypes.byref(data), 0)
            if code:
                if code != _TIMEOUT:
                    self._handle_wait_error(self._nvml.error(code))
                break
            event_type = _EVENT_TYPES.get(data.eventType)
            if event_type is None:
                continue
            for uuid in self._affected_devices(data):
                key = (uuid, event_type, int(data.eventData) if event_type == "xid" else None)
                counts[key] = counts.get(key, 0) + 1
        now = self._now()
        return [GpuError(now, uuid, kind, xid, n) for (uuid, kind, xid), n in counts.items()]

    def _register(self, board: str) -> None:
        handle = self._nvml.handles[board]
        types = _EVENT_MASK & self._nvml.call("nvmlDeviceGetSupportedEventTypes", handle)
        if not types:
            raise NvmlError("NOT_SUPPORTED", "the driver reports no error events for this GPU")
        self._nvml.call("nvmlDeviceRegisterEvents", handle, types, self._event_set)
        self._boards_by_handle[_handle_address(handle)] = board
        self._mig_slices[board] = [(self._gpu_instance_id(d), d.uuid) for d in self._devices if d.parent == board]

    def _gpu_instance_id(self, device: Device) -> int | None:
        try:
            return int(self._nvml.call("nvmlDeviceGetGpuInstanceId", self._nvml.handles[device.uuid]))
        except NvmlError:
            return None

    def _affected_devices(self, data: Any) -> list[str]:
        """Return the UUIDs of the job's devices that an event affects."""
        board = self._boards_by_handle.get(_handle_address(data.device))
        if board is None:
            return []
        slices = self._mig_slices[board]
        affected = [] if slices and all(d.uuid != board for d in self._devices) else [board]
        is_whole_gpu = data.gpuInstanceId == _WHOLE_GPU
        return affected + [uuid for instance, uuid in slices if is_whole_gpu or instance in (None, data.gpuInstanceId)]

    def _handle_wait_error(self, error: NvmlError) -> None:
        """Resubscribe without the lost GPUs: one lost GPU makes the wait fail for all."""
        if error.name not in _LOST_ERRORS:
            self.reasons = {d.uuid: error.reason for d in self._devices}
            self._release()
            return
        lost = set()
        for board in self._boards_by_handle.values():
            try:
                self._nvml.call("nvmlDeviceGetUUID", self._nvml.handles[board])
            except NvmlError:
                lost.add(board)
        if lost:
            self._register_all(lost)
        else:  # NVML does not report which GPU is lost
            self.reasons = {d.uuid: error.reason for d in self._devices}
            self._release()

    def _on_nvml_close(self) -> None:
        self._registered = False
        self._release()

    def _release(self) -> None:
        if self._event_set is not None:
            with contextlib.suppress(NvmlError):
                self._nvml.call("nvmlEventSetFree", self._event_set)
        self._event_set = None
        self._boards_by_handle, self._mig_slices = {}, {}


class EventRateLimiter:
    """Limits repeated events: one line per error adds nothing to their number.

    The first event of a kind is due at once; later ones are summed and due once per minute. Corrected errors are never
    due because a counter records them.
    """

    def __init__(self) -> None:
        self._last_reported: dict[tuple[str, GpuEventType, int | None], float] = {}
        self._pending: dict[tuple[str, GpuEventType, int | None], GpuError] = {}

    @property
    def has_pending(self) -> bool:
        """Whether events are held back."""
        return bool(self._pending)

    def take_due(self, events: Sequence[GpuError], now: float) -> list[GpuError]:
        """Add ``events`` and return all events due at ``now`` (monotonic s)."""
        for e in events:
            key = (e.uuid, e.kind, e.xid)
            pending = self._pending.get(key)
            if e.kind != "ecc_corrected":
                self._pending[key] = e if pending is None else msgspec.structs.replace(e, count=pending.count + e.count)
        ready = [k for k in self._pending if now >= self._last_reported.get(k, -math.inf) + REPORT_INTERVAL_S]
        self._last_reported.update(dict.fromkeys(ready, now))
        return [self._pending.pop(k) for k in ready]

    def drain(self) -> list[GpuError]:
        """Return and clear all held-back events."""
        remaining = list(self._pending.values())
        self._pending.clear()
        return remaining


def _handle_address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
