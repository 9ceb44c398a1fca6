"""What the sampler says to others while it samples: events of the attempt, and those who watch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from clustertrain import clock
from clustertrain.telemetry.readers.nvml import Device
from clustertrain.telemetry.readers.nvml_events import GpuEvent, Storm
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts

OnEvent = Callable[..., Any]
SETTLED_S = 120.0  # an alert is cleared when all was well for a while
_NEVER_THERE = ("NOT_FOUND", "NO_PERMISSION")  # not lost: it is not shown to this job


class Observer(Protocol):
    """Sees every sample and every error that the driver tells, in the sampler's thread: must be quick."""

    def listening(self, uuids: Sequence[str]) -> object:
        """The driver will tell errors of these devices."""

    def observe(self, snapshot: Snapshot) -> object: ...

    def event(self, kind: str, uuid: str, *, xid: int | None = None, count: int = 1) -> object:
        """``gpu_lost``, ``gpu_back``, or as of :class:`.GpuEvent`: ``xid``, ``ecc_corrected``, ``ecc_uncorrected``."""


class Telling:
    """Args:
    on_event: called as ``on_event(name, node=…, **fields)``; None: nobody listens.
    observers: one that raises is told of and left out from then on.
    """

    def __init__(self, on_event: OnEvent | None, node: str, observers: Sequence[Observer]) -> None:
        self._on_event = on_event
        self._node = node
        self.observers = list(observers)
        self._storm = Storm()
        self._lost: set[str] = set()
        self._returned: dict[str, float] = {}  # until when it is told again and again

    def event(self, name: str, **values: Any) -> None:
        if self._on_event is None:
            return
        with contextlib.suppress(OSError):  # the disk that refuses the samples refuses the events too
            self._on_event(name, node=self._node, **values)

    def sample(self, snapshot: Snapshot) -> None:
        self._to_all("observe", snapshot)

    def listening(self, uuids: Sequence[str]) -> None:
        self._to_all("listening", uuids)

    def errors(self, found: Sequence[GpuEvent], facts: Sequence[GpuFacts], at: float) -> None:
        """What the driver told until ``at`` (monotonic s): all of it to who watches, to the events no storm."""
        for e in found:
            self._to_all("event", e.kind, e.uuid, xid=e.xid, count=e.count)
        if found or self._storm.holds:
            self._write(self._storm.due(found, at), facts)

    def rest(self, facts: Sequence[GpuFacts]) -> None:
        """At the end: the errors that were held back."""
        self._write(self._storm.rest(), facts)

    def health(self, device: Device, lost: str | None) -> bool:
        """``lost``: why the device cannot be reached, None where it can. Whether it has just come back."""
        uuid = device.uuid
        if (device.reason or "").startswith(_NEVER_THERE):
            return False  # the report tells it from the allocation
        if lost is not None and uuid not in self._lost:
            self._lost.add(uuid)
            self._returned.pop(uuid, None)
            self.event("gpu_lost", uuid=uuid, index=device.index, reason=lost)
            self._to_all("event", "gpu_lost", uuid)
        elif lost is None and uuid in self._lost:
            self._lost.remove(uuid)
            self._returned[uuid] = clock.monotonic() + SETTLED_S
            self.event("gpu_back", uuid=uuid, index=device.index)
            return True
        return False

    def returned(self, now: float) -> None:
        """To who watches, again and again for a while: an alert is cleared by what lasts."""
        for uuid, until in list(self._returned.items()):
            self._to_all("event", "gpu_back", uuid)
            if now > until:
                del self._returned[uuid]

    def _write(self, found: Sequence[GpuEvent], facts: Sequence[GpuFacts]) -> None:
        index = {f.uuid: f.index for f in facts}
        for e in found:
            self.event("gpu_event", uuid=e.uuid, index=index.get(e.uuid), kind=e.kind, xid=e.xid, count=e.count)

    def _to_all(self, what: str, *args: Any, **values: Any) -> None:
        for observer in list(self.observers):
            try:
                getattr(observer, what)(*args, **values)
            except Exception as e:  # one who watches must not end the sampling
                self.observers.remove(observer)
                self.event("telemetry_failed", reason=f"{type(observer).__name__} is off: {type(e).__name__}: {e}")
