"""Dispatch of samples and GPU errors from the sampler to the attempt's events and to observers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

from clustertrain import clock
from clustertrain.run.events import WriteEvent
from clustertrain.telemetry.readers.nvml import Device
from clustertrain.telemetry.readers.nvml_events import EventRateLimiter, GpuError
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts

RECOVERY_NOTICE_S = 120.0  # an alert clears only after the device was healthy for a while
_NEVER_VISIBLE = ("NOT_FOUND", "NO_PERMISSION")  # not lost: the device is hidden from this job


class Observer(Protocol):
    """Receiver of every sample and every driver error; called in the sampler's thread, so it must be quick."""

    def watch_errors(self, uuids: Sequence[str]) -> object:
        """Take note that the driver reports errors of these devices from now on."""

    def observe(self, snapshot: Snapshot) -> object:
        """Process one sample."""

    def record_error(self, kind: str, uuid: str, *, xid: int | None = None, count: int = 1) -> object:
        """Process a device event.

        ``kind`` is ``gpu_lost``, ``gpu_back``, or one of :class:`.GpuError`: ``xid``, ``ecc_corrected``,
        ``ecc_uncorrected``.
        """


class EventDispatcher:
    """Passes samples and errors on to observers and to the attempt's events.

    Args:
        on_event: called as ``on_event(name, node=…, **fields)``; None discards events.
        observers: an observer that raises is removed, and an event reports it.
    """

    def __init__(self, on_event: WriteEvent | None, node: str, observers: Sequence[Observer]) -> None:
        self._on_event = on_event
        self._node = node
        self.observers = list(observers)
        self._storm = EventRateLimiter()
        self._lost_uuids: set[str] = set()
        self._recovered_until: dict[str, float] = {}  # by UUID, until when ``gpu_back`` is repeated

    def write_event(self, name: str, **fields: object) -> None:
        """Write an event of this node; a write error is ignored."""
        if self._on_event is None:
            return
        with contextlib.suppress(OSError):  # a disk that refuses samples refuses events too
            self._on_event(name, node=self._node, **fields)

    def notify_sample(self, snapshot: Snapshot) -> None:
        self._notify("observe", snapshot)

    def notify_watched(self, uuids: Sequence[str]) -> None:
        self._notify("watch_errors", uuids)

    def report_errors(self, events: Sequence[GpuError], gpus: Sequence[GpuFacts], now: float) -> None:
        """Pass driver errors to the observers, and rate-limited to the events; ``now`` is monotonic s."""
        for e in events:
            self._notify("record_error", e.kind, e.uuid, xid=e.xid, count=e.count)
        if events or self._storm.has_pending:
            self._write_gpu_events(self._storm.take_due(events, now), gpus)

    def flush(self, gpus: Sequence[GpuFacts]) -> None:
        """Write the errors that the rate limiter still holds."""
        self._write_gpu_events(self._storm.drain(), gpus)

    def update_health(self, device: Device, lost_reason: str | None) -> bool:
        """Report the loss or the return of a device; return whether it has just come back.

        ``lost_reason`` says why the device is unreachable; None if it is reachable.
        """
        uuid = device.uuid
        if (device.reason or "").startswith(_NEVER_VISIBLE):
            return False  # the report derives it from the allocation
        if lost_reason is not None and uuid not in self._lost_uuids:
            self._lost_uuids.add(uuid)
            self._recovered_until.pop(uuid, None)
            self.write_event("gpu_lost", uuid=uuid, index=device.index, reason=lost_reason)
            self._notify("record_error", "gpu_lost", uuid)
        elif lost_reason is None and uuid in self._lost_uuids:
            self._lost_uuids.remove(uuid)
            self._recovered_until[uuid] = clock.monotonic() + RECOVERY_NOTICE_S
            self.write_event("gpu_back", uuid=uuid, index=device.index)
            return True
        return False

    def notify_recovered(self, now: float) -> None:
        """Repeat ``gpu_back`` to the observers for a while: an alert clears only if recovery lasts."""
        for uuid, until in list(self._recovered_until.items()):
            self._notify("record_error", "gpu_back", uuid)
            if now > until:
                del self._recovered_until[uuid]

    def _write_gpu_events(self, events: Sequence[GpuError], gpus: Sequence[GpuFacts]) -> None:
        index_by_uuid = {f.uuid: f.index for f in gpus}
        for e in events:
            self.write_event(
                "gpu_event", uuid=e.uuid, index=index_by_uuid.get(e.uuid), kind=e.kind, xid=e.xid, count=e.count
            )

    def _notify(self, method: str, *args: object, **kwargs: object) -> None:
        for observer in list(self.observers):
            try:
                getattr(observer, method)(*args, **kwargs)
            except Exception as e:  # an observer must not end sampling
                self.observers.remove(observer)
                self.write_event(
                    "telemetry_failed", reason=f"{type(observer).__name__} disabled: {type(e).__name__}: {e}"
                )
