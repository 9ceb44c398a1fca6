"""Reads one GPU again and again: a field that fails is None with its reason, and is tried again, ever more rarely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from clustertrain import clock
from clustertrain.telemetry.nvml import FIELDS, Device, NvmlError

_LOST = frozenset({"GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND"})
_SESSION_DEAD = frozenset({"UNINITIALIZED", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH"})
_LASTING = frozenset({"NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION"})


class Door(Protocol):
    """What is needed of :class:`~clustertrain.telemetry.nvml.Nvml`."""

    def find(self, uuid: str) -> None: ...

    def holds(self, uuid: str) -> bool: ...

    def read(self, uuid: str, field: str) -> float: ...


class Backoff:
    """When to try again: the wait doubles from ``first_s`` to ``most_s``."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._wait_s = first_s
        self._most_s = most_s
        self._at = float("-inf")

    def failed(self, now: float) -> None:
        self._at = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._most_s)

    def due(self, now: float) -> bool:
        return now >= self._at


class GpuReader:
    """One allocated GPU.

    ``reasons`` says for each field that has no value why; ``lost`` why the whole device cannot be reached, else None;
    ``session_dead`` that NVML itself must be opened again.
    """

    def __init__(self, door: Door, device: Device, now: Callable[[], float] = clock.monotonic) -> None:
        self._door = door
        self.device = device
        self._now = now
        self._retries: dict[str, Backoff] = {}
        self._return = Backoff(5, 60)
        self.reasons: dict[str, str] = {}
        self.lost: str | None = None
        self.session_dead = False
        if device.reason is not None:
            self._lose(device.reason)

    def read(self) -> list[float | None] | None:
        """The values in the order of FIELDS, or None while the device is lost."""
        now = self._now()
        if self.lost is not None and not self._came_back(now):
            return None
        values: list[float | None] = []
        for field in FIELDS:
            retry = self._retries.get(field)
            values.append(self._read(field, now) if retry is None or retry.due(now) else None)
            if self.lost is not None:
                return None
        return values

    def reopened(self) -> None:
        """NVML was opened again: try everything at once."""
        self._retries.clear()
        self.session_dead = False

    def _read(self, field: str, now: float) -> float | None:
        try:
            value = self._door.read(self.device.uuid, field)
        except NvmlError as e:
            if e.name in _LOST:
                self._lose(e.reason)
                return None
            self.session_dead = self.session_dead or e.name in _SESSION_DEAD
            self.reasons[field] = e.reason
            lasting = e.name in _LASTING
            self._retries.setdefault(field, Backoff(60, 3600) if lasting else Backoff(2, 60)).failed(now)
            return None
        self._retries.pop(field, None)
        self.reasons.pop(field, None)
        return value

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self.reasons = dict.fromkeys(FIELDS, reason)
        self._retries.clear()
        self._return = Backoff(5, 60)
        self._return.failed(self._now())

    def _came_back(self, now: float) -> bool:
        if not self._return.due(now):
            return False
        try:
            self._door.find(self.device.uuid)
            self._door.read(self.device.uuid, FIELDS[0])
        except NvmlError as e:
            # With a handle, a field that this GPU never offered says nothing about its health; without one, all does.
            if not (self._door.holds(self.device.uuid) and e.name in _LASTING):
                self._return.failed(now)
                return False
        self.lost = None
        self.reasons = {}
        return True
