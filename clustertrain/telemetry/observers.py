"""What the sampler says to others while it samples: events of the attempt, and those who watch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from clustertrain import clock
from clustertrain.telemetry.readers.nvml import Device
from clustertrain.telemetry.readers.nvml_events import EventRateLimiter, GpuEvent
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts

OnEvent = Callable[..., Any]
RECOVERY_NOTICE_S = 120.0  # an alert is cleared when all was well for a while
_NEVER_VISIBLE = ("NOT_FOUND", "NO_PERMISSION")  # not lost: it is not shown to this job


class Observer(Protocol):
    """Sees every sample and every error that the driver tells, in the sampler's thread: must be quick."""

    def listening(self, uuids: Sequence[str]) -> object:
        """The driver will tell errors of these devices."""

    def observe(self, snapshot: Snapshot) -> object: ...

    def event(self, kind: str, uuid: str, *, xid: int | None = None, count: int = 1) -> object:
        """``gpu_lost``, ``gpu_back``, or as of :class:`.GpuEvent`: ``xid``, ``ecc_corrected``, ``ecc_uncorrected``."""


class EventDispatcher:
    """Args:
    on_event: called as ``on_event(name, node=…, **fields)``; None: nobody listens.
    observers: one that raises is told of and left out from then on.
    """

    def __init__(self, on_event: OnEvent | None, node: str, observers: Sequence[Observer]) -> None:
        self._on_event = on_event
        self._node = node
        self.observers = list(observers)
        self._storm = EventRateLimiter()
        self._lost_uuids: set[str] = set()
        self._recovered_until: dict[str, float] = {}  # until when it is told again and again

    def write_event(self, name: str, **fields: Any) -> None:
        if self._on_event is None:
            return
        with contextlib.suppress(OSError):  # the disk that refuses the samples refuses the events too
            self._on_event(name, node=self._node, **fields)

    def notify_sample(self, snapshot: Snapshot) -> None:
        self._notify("observe", snapshot)

    def notify_watched(self, uuids: Sequence[str]) -> None:
        self._notify("listening", uuids)

    def report_errors(self, events: Sequence[GpuEvent], gpus: Sequence[GpuFacts], now: float) -> None:
        """What the driver told until ``now`` (monotonic s): all of it to who watches, to the events no storm."""
        for e in events:
            self._notify("event", e.kind, e.uuid, xid=e.xid, count=e.count)
        if events or self._storm.has_pending:
            self._write_gpu_events(self._storm.take_due(events, now), gpus)

    def flush(self, gpus: Sequence[GpuFacts]) -> None:
        """At the end: the errors that were held back."""
        self._write_gpu_events(self._storm.drain(), gpus)

    def update_health(self, device: Device, lost_reason: str | None) -> bool:
        """``lost_reason``: why the device cannot be reached, None where it can. Whether it has just come back."""
        uuid = device.uuid
        if (device.reason or "").startswith(_NEVER_VISIBLE):
            return False  # the report tells it from the allocation
        if lost_reason is not None and uuid not in self._lost_uuids:
            self._lost_uuids.add(uuid)
            self._recovered_until.pop(uuid, None)
            self.write_event("gpu_lost", uuid=uuid, index=device.index, reason=lost_reason)
            self._notify("event", "gpu_lost", uuid)
        elif lost_reason is None and uuid in self._lost_uuids:
            self._lost_uuids.remove(uuid)
            self._recovered_until[uuid] = clock.monotonic() + RECOVERY_NOTICE_S
            self.write_event("gpu_back", uuid=uuid, index=device.index)
            return True
        return False

    def notify_recovered(self, now: float) -> None:
        """To who watches, again and again for a while: an alert is cleared by what lasts."""
        for uuid, until in list(self._recovered_until.items()):
            self._notify("event", "gpu_back", uuid)
            if now > until:
                del self._recovered_until[uuid]

    def _write_gpu_events(self, events: Sequence[GpuEvent], gpus: Sequence[GpuFacts]) -> None:
        index_by_uuid = {f.uuid: f.index for f in gpus}
        for e in events:
            self.write_event(
                "gpu_event", uuid=e.uuid, index=index_by_uuid.get(e.uuid), kind=e.kind, xid=e.xid, count=e.count
            )

    def _notify(self, method: str, *args: Any, **kwargs: Any) -> None:
        for observer in list(self.observers):
            try:
                getattr(observer, method)(*args, **kwargs)
            except Exception as e:  # one who watches must not end the sampling
                self.observers.remove(observer)
                self.write_event(
                    "telemetry_failed", reason=f"{type(observer).__name__} is off: {type(e).__name__}: {e}"
                )
