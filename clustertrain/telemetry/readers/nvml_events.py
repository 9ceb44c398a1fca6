"""Errors that the driver tells as they happen: XIDs and ECC errors.

They are asked for in the sampler's own thread, without waiting: NVML then only looks whether something is queued, so a
thread of its own, which would have to be ended while it waits inside the driver, gains nothing but a better time than
that of the tick. The queue keeps what comes between two ticks.
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

Kind = Literal["xid", "ecc_corrected", "ecc_uncorrected"]

# nvmlEventType*
_KINDS: dict[int, Kind] = {0x1: "ecc_corrected", 0x2: "ecc_uncorrected", 0x8: "xid"}
_WANTED = 0x1 | 0x2 | 0x8
_TIMEOUT = 10  # nvmlReturn_t: nothing has happened
EVERY_S = 60.0
_LOST = ("GPU_IS_LOST", "RESET_REQUIRED")
_WHOLE_GPU = 0xFFFFFFFF  # as the number of a GPU instance: the event is not of a MIG slice
_MOST_AT_ONCE = 1000  # a storm of ECC errors must not hold up the samples; the rest waits in the queue


class GpuEvent(msgspec.Struct, frozen=True):
    """``count`` occurrences on the device ``uuid`` since the last time; ``t`` (UTC epoch s) is when they were read, at
    most a tick later. ``xid`` is the number, None of ECC errors."""

    t: float
    uuid: str
    kind: Kind
    xid: int | None
    count: int


class GpuEvents:
    """The events of the job's devices; those of a board that has been split come to the slices that they concern.

    ``reasons`` says for each device that tells none why.
    """

    def __init__(self, nvml: Nvml, devices: Sequence[Device], now: Callable[[], float] = clock.now) -> None:
        self._nvml = nvml
        self._devices = [d for d in devices if d.reason is None]
        self._now = now
        self._set: Any = None
        self._data: Any = None
        self._wait: Callable[..., int] = nvml.function("nvmlEventSetWait_v2")
        self._registered = False
        self._boards: dict[int, str] = {}
        self._slices: dict[str, list[tuple[int | None, str]]] = {}
        self.reasons: dict[str, str] = {}

    def open(self) -> None:
        """Begin to listen, anew where it did already: after NVML was opened again, or a device was lost or has come
        back. Events until then are gone."""
        self._listen(set())

    def _listen(self, lost: set[str]) -> None:
        """To all boards but the lost ones."""
        self._release()
        self.reasons = {}
        try:
            self._set = self._nvml.call("nvmlEventSetCreate")
        except NvmlError as e:
            self.reasons = {d.uuid: e.reason for d in self._devices}
            return
        self._data = self._nvml.lib.c_nvmlEventData_t()
        self._wait = self._nvml.function("nvmlEventSetWait_v2")
        if not self._registered:
            self._registered = True
            self._nvml.before_close(self._closing)
        for board in dict.fromkeys(d.parent or d.uuid for d in self._devices):
            try:
                if board in lost:
                    raise NvmlError("GPU_IS_LOST")
                self._register(board)
            except NvmlError as e:
                self.reasons |= {d.uuid: e.reason for d in self._devices if board in (d.uuid, d.parent)}

    def poll(self) -> list[GpuEvent]:
        """What has happened since the last time. A board that cannot be asked any more stops being listened to."""
        if not self._boards:
            return []
        counts: dict[tuple[str, Kind, int | None], int] = {}
        data = self._data
        for _ in range(_MOST_AT_ONCE):
            code = self._wait(self._set, ctypes.byref(data), 0)
            if code:
                if code != _TIMEOUT:
                    self._stumble(self._nvml.error(code))
                break
            kind = _KINDS.get(data.eventType)
            if kind is None:
                continue
            for uuid in self._concerned(data):
                key = (uuid, kind, int(data.eventData) if kind == "xid" else None)
                counts[key] = counts.get(key, 0) + 1
        now = self._now()
        return [GpuEvent(now, uuid, kind, xid, n) for (uuid, kind, xid), n in counts.items()]

    def _register(self, board: str) -> None:
        handle = self._nvml.handles[board]
        types = _WANTED & self._nvml.call("nvmlDeviceGetSupportedEventTypes", handle)
        if not types:
            raise NvmlError("NOT_SUPPORTED", "the driver tells no errors of this GPU as they happen")
        self._nvml.call("nvmlDeviceRegisterEvents", handle, types, self._set)
        self._boards[_address(handle)] = board
        self._slices[board] = [(self._instance(d), d.uuid) for d in self._devices if d.parent == board]

    def _instance(self, device: Device) -> int | None:
        try:
            return int(self._nvml.call("nvmlDeviceGetGpuInstanceId", self._nvml.handles[device.uuid]))
        except NvmlError:
            return None

    def _concerned(self, data: Any) -> list[str]:
        """The devices of the job that an event is about."""
        board = self._boards.get(_address(data.device))
        if board is None:
            return []
        slices = self._slices[board]
        found = [] if slices and all(d.uuid != board for d in self._devices) else [board]
        whole = data.gpuInstanceId == _WHOLE_GPU
        return found + [uuid for instance, uuid in slices if whole or instance in (None, data.gpuInstanceId)]

    def _stumble(self, error: NvmlError) -> None:
        """One lost GPU makes the wait fail for all: listen to the others, from now on."""
        if error.name not in _LOST:
            self.reasons = {d.uuid: error.reason for d in self._devices}
            self._release()
            return
        lost = set()
        for board in self._boards.values():
            try:
                self._nvml.call("nvmlDeviceGetUUID", self._nvml.handles[board])
            except NvmlError:
                lost.add(board)
        if lost:
            self._listen(lost)
        else:  # it is not told which
            self.reasons = {d.uuid: error.reason for d in self._devices}
            self._release()

    def _closing(self) -> None:
        self._registered = False
        self._release()

    def _release(self) -> None:
        if self._set is not None:
            with contextlib.suppress(NvmlError):
                self._nvml.call("nvmlEventSetFree", self._set)
        self._set = None
        self._boards, self._slices = {}, {}


class Storm:
    """Holds back what comes again and again: a line for each of thousands of errors tells no more than their number.

    The first of its kind is due at once, what follows once a minute, summed up. Corrected errors are never due: their
    counter has them.
    """

    def __init__(self) -> None:
        self._told: dict[tuple[str, Kind, int | None], float] = {}
        self._held: dict[tuple[str, Kind, int | None], GpuEvent] = {}

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return bool(self._held)

    def due(self, found: Sequence[GpuEvent], now: float) -> list[GpuEvent]:
        """What is to be told at ``now`` (monotonic s), of ``found`` and of what was held back."""
        for e in found:
            key = (e.uuid, e.kind, e.xid)
            before = self._held.get(key)
            if e.kind != "ecc_corrected":
                self._held[key] = e if before is None else msgspec.structs.replace(e, count=before.count + e.count)
        ready = [k for k in self._held if now >= self._told.get(k, -math.inf) + EVERY_S]
        self._told.update(dict.fromkeys(ready, now))
        return [self._held.pop(k) for k in ready]

    def rest(self) -> list[GpuEvent]:
        """At the end, what was held back."""
        left = list(self._held.values())
        self._held.clear()
        return left


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
