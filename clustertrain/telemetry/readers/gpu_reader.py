"""Reads one GPU again and again: a field that fails is None with its reason, and is tried again, ever more rarely."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from clustertrain import clock
from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW, Pace
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError
from clustertrain.telemetry.readers.nvml_queries import Call, GpuCalls

_LOST = frozenset({"GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND"})
_SESSION_DEAD = frozenset({"UNINITIALIZED", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH"})
_LASTING = frozenset({"NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION"})
_PASSING = frozenset({"NO_DATA"})  # the next tick may have it

_FIELDS = {pace: tuple(f.name for f in fields.GPU if f.pace == pace) for pace in (FAST, SLOW)}
_PLACE = {name: i for names in _FIELDS.values() for i, name in enumerate(names)}
_CEILING = {f.name: f.ceiling for f in fields.GPU}

_Values = list[float | NvmlError | None]


class Calls(Protocol):
    """What is needed of :class:`~clustertrain.telemetry.readers.nvml_queries.GpuCalls`."""

    @property
    def calls(self) -> Mapping[Pace, tuple[Call, ...]]: ...

    @property
    def absent(self) -> Mapping[str, str]: ...

    def find(self) -> None: ...

    def handle(self) -> Any: ...

    def holds(self) -> bool: ...


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
    """One allocated GPU, or a MIG slice of one.

    ``reasons`` says for each field that has no value why; ``lost`` why the whole device cannot be reached, else None;
    ``session_dead`` that NVML itself must be opened again. ``calls`` stands in for NVML in tests.
    """

    def __init__(
        self,
        nvml: Nvml,
        device: Device,
        now: Callable[[], float] = clock.monotonic,
        calls: Calls | None = None,
    ) -> None:
        self._calls: Calls = GpuCalls(nvml, device) if calls is None else calls
        # By pace, in the order of the calls: the fields' places in the registry, and the highest values that can be.
        self._places = {
            pace: tuple((_PLACE[f], _CEILING[f]) for call in each for f in call.fields)
            for pace, each in self._calls.calls.items()
        }
        self.device = device
        self._now = now
        self._retries: dict[str, Backoff] = {}
        self._return = Backoff(5, 60)
        self.reasons: dict[str, str] = dict(self._calls.absent)
        self.lost: str | None = None
        self.session_dead = False
        if device.reason is not None:
            self._lose(device.reason)

    def read(self, pace: Pace = FAST) -> list[float | None] | None:
        """The values of the fields of this pace in the order of the registry, or None while the device is lost."""
        now = self._now()
        if self.lost is not None and not self._came_back(now):
            return None
        names, reasons = _FIELDS[pace], self.reasons
        found: list[float | None] = [None] * len(names)
        for (place, ceiling), value in zip(self._places[pace], self._values(pace, now), strict=False):
            if isinstance(value, float) and 0 <= value <= ceiling:
                found[place] = value
                if reasons and names[place] in reasons:
                    self._retries.pop(names[place], None)
                    del reasons[names[place]]
            elif value is not None:
                self._failed(names[place], _error(value, names[place]), now)
                if self.lost is not None:
                    return None
        return found

    def reopened(self) -> None:
        """NVML was opened again: try everything at once."""
        self._retries.clear()
        self.session_dead = False

    def _values(self, pace: Pace, now: float) -> _Values:
        """What the calls said, in their order; None where it was not time to ask. Ends with the error of a lost GPU."""
        found: _Values = []
        handle = None
        for call in self._calls.calls[pace]:
            wanted = call.fields
            if self._retries:
                wanted = tuple(f for f in wanted if f not in self._retries or self._retries[f].due(now))
            if not wanted:
                found += [None] * len(call.fields)
                continue
            try:
                handle = handle or self._calls.handle()
                values = call.read(handle, wanted)
            except NvmlError as e:
                values = [e] * len(call.fields)
                if e.name in _LOST:
                    return [*found, *values]
            found += values if len(wanted) == len(call.fields) else _only(wanted, call.fields, values)
        return found

    def _failed(self, field: str, error: NvmlError, now: float) -> None:
        if error.name in _LOST:
            self._lose(error.reason)
            return
        self.session_dead = self.session_dead or error.name in _SESSION_DEAD
        self.reasons[field] = error.reason
        if error.name not in _PASSING:
            lasting = error.name in _LASTING
            self._retries.setdefault(field, Backoff(60, 3600) if lasting else Backoff(2, 60)).failed(now)

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self.reasons = {f.name: reason for f in fields.GPU}
        self._retries.clear()
        self._return = Backoff(5, 60)
        self._return.failed(self._now())

    def _came_back(self, now: float) -> bool:
        if not self._return.due(now):
            return False
        probe = self._calls.calls[FAST][0]
        try:
            self._calls.find()
            probe.read(self._calls.handle(), probe.fields)
        except NvmlError as e:
            # With a handle, a field that this GPU never offered says nothing about its health; without one, all does.
            if not (self._calls.holds() and e.name in _LASTING):
                self._return.failed(now)
                return False
        self.lost = None
        self.reasons = dict(self._calls.absent)
        return True


def _only(wanted: tuple[str, ...], fields: tuple[str, ...], values: Sequence[float | NvmlError]) -> _Values:
    return [value if field in wanted else None for field, value in zip(fields, values, strict=True)]


def _error(value: float | NvmlError, field: str) -> NvmlError:
    if isinstance(value, NvmlError):
        return value
    return NvmlError("IMPLAUSIBLE", f"the driver returned {value:g} for {field}")
