"""Repeated reading of one GPU: a field that fails is None with a recorded reason, and is retried with backoff."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from clustertrain import clock
from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW, Pace
from clustertrain.telemetry.readers.nvml import Device, Nvml, NvmlError
from clustertrain.telemetry.readers.nvml_queries import GpuQueries, Query

_LOST_ERRORS = frozenset({"GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND"})
_SESSION_ERRORS = frozenset({"UNINITIALIZED", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH"})
_PERMANENT_ERRORS = frozenset({"NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION"})
_TRANSIENT_ERRORS = frozenset({"NO_DATA"})  # the next tick may have it

_FIELDS = {pace: tuple(f.name for f in fields.GPU if f.pace == pace) for pace in (FAST, SLOW)}
_FIELD_INDEX = {name: i for names in _FIELDS.values() for i, name in enumerate(names)}
_MAX_VALID = {f.name: f.max_valid for f in fields.GPU}

_Values = list[float | NvmlError | None]


class QuerySource(Protocol):
    """Interface that :class:`GpuReader` needs of :class:`~clustertrain.telemetry.readers.nvml_queries.GpuQueries`."""

    @property
    def queries(self) -> Mapping[Pace, tuple[Query, ...]]: ...

    @property
    def unsupported(self) -> Mapping[str, str]: ...

    def refresh(self) -> None: ...

    def handle(self) -> object: ...

    def has_handle(self) -> bool: ...


class Backoff:
    """Retry schedule whose wait doubles from ``initial_s`` to ``max_s``."""

    def __init__(self, initial_s: float, max_s: float) -> None:
        self._wait_s = initial_s
        self._max_s = max_s
        self._retry_at = float("-inf")

    def record_failure(self, now: float) -> None:
        self._retry_at = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._max_s)

    def is_due(self, now: float) -> bool:
        return now >= self._retry_at


class GpuReader:
    """Reader of one allocated GPU or MIG slice.

    Attributes:
        reasons: by field, why it has no value.
        lost_reason: why the whole device cannot be reached; None if it can.
        needs_reopen: whether NVML must be reopened.
    """

    def __init__(
        self,
        nvml: Nvml,
        device: Device,
        now: Callable[[], float] = clock.monotonic,
        queries: QuerySource | None = None,
    ) -> None:
        self._queries: QuerySource = GpuQueries(nvml, device) if queries is None else queries
        # By pace, in the order of the queries: each field's index in the row and its highest valid value.
        self._slots = {
            pace: tuple((_FIELD_INDEX[f], _MAX_VALID[f]) for query in pace_queries for f in query.fields)
            for pace, pace_queries in self._queries.queries.items()
        }
        self.device = device
        self._now = now
        self._retries: dict[str, Backoff] = {}
        self._recovery = Backoff(5, 60)
        self.reasons: dict[str, str] = dict(self._queries.unsupported)
        self.lost_reason: str | None = None
        self.needs_reopen = False
        if device.reason is not None:
            self._mark_lost(device.reason)

    def read(self, pace: Pace = FAST) -> list[float | None] | None:
        """Return the values of this pace's fields in the order of the registry; None while the device is lost."""
        now = self._now()
        if self.lost_reason is not None and not self._has_recovered(now):
            return None
        names, reasons = _FIELDS[pace], self.reasons
        row: list[float | None] = [None] * len(names)
        for (index, max_valid), value in zip(self._slots[pace], self._run_queries(pace, now), strict=False):
            if isinstance(value, float) and 0 <= value <= max_valid:
                row[index] = value
                if reasons and names[index] in reasons:
                    self._retries.pop(names[index], None)
                    del reasons[names[index]]
            elif value is not None:
                self._record_failure(names[index], _as_error(value, names[index]), now)
                if self.lost_reason is not None:
                    return None
        return row

    def on_reopen(self) -> None:
        """Retry all fields at once, after NVML was reopened."""
        self._retries.clear()
        self.needs_reopen = False

    def _run_queries(self, pace: Pace, now: float) -> _Values:
        """Return the results in query order, None for fields not yet due; stop at the error of a lost GPU."""
        results: _Values = []
        handle = None
        for query in self._queries.queries[pace]:
            requested = query.fields
            if self._retries:
                requested = tuple(f for f in requested if f not in self._retries or self._retries[f].is_due(now))
            if not requested:
                results += [None] * len(query.fields)
                continue
            try:
                handle = handle or self._queries.handle()
                values = query.read(handle, requested)
            except NvmlError as e:
                values = [e] * len(query.fields)
                if e.name in _LOST_ERRORS:
                    return [*results, *values]
            results += values if len(requested) == len(query.fields) else _scatter(requested, query.fields, values)
        return results

    def _record_failure(self, field: str, error: NvmlError, now: float) -> None:
        if error.name in _LOST_ERRORS:
            self._mark_lost(error.reason)
            return
        self.needs_reopen = self.needs_reopen or error.name in _SESSION_ERRORS
        self.reasons[field] = error.reason
        if error.name not in _TRANSIENT_ERRORS:
            is_permanent = error.name in _PERMANENT_ERRORS
            self._retries.setdefault(field, Backoff(60, 3600) if is_permanent else Backoff(2, 60)).record_failure(now)

    def _mark_lost(self, reason: str) -> None:
        self.lost_reason = reason
        self.reasons = {f.name: reason for f in fields.GPU}
        self._retries.clear()
        self._recovery = Backoff(5, 60)
        self._recovery.record_failure(self._now())

    def _has_recovered(self, now: float) -> bool:
        if not self._recovery.is_due(now):
            return False
        probe = self._queries.queries[FAST][0]
        try:
            self._queries.refresh()
            probe.read(self._queries.handle(), probe.fields)
        except NvmlError as e:
            # With a handle, an error for an unsupported field does not mean that the GPU is lost.
            if not (self._queries.has_handle() and e.name in _PERMANENT_ERRORS):
                self._recovery.record_failure(now)
                return False
        self.lost_reason = None
        self.reasons = dict(self._queries.unsupported)
        return True


def _scatter(requested: tuple[str, ...], fields: tuple[str, ...], values: Sequence[float | NvmlError]) -> _Values:
    return [value if field in requested else None for field, value in zip(fields, values, strict=True)]


def _as_error(value: float | NvmlError, field: str) -> NvmlError:
    if isinstance(value, NvmlError):
        return value
    return NvmlError("IMPLAUSIBLE", f"the driver returned {value:g} for {field}")
