"""Lock-free transfer of snapshots from the sampler's thread to the exporter's threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from clustertrain import clock
from clustertrain.telemetry.snapshot import Snapshot

STALE_S = 30.0  # older snapshots are not exported: the sampler hangs in the driver or has ended


class Labels(msgspec.Struct, frozen=True):
    """Labels of every metric."""

    run: str
    job_id: str  # empty without a job
    attempt: int
    node: str


class Feed:
    """Newest snapshot and counts. One thread writes; a reader may see counts one sample ahead of ``newest``."""

    def __init__(self, labels: Labels, interval_s: float) -> None:
        self.labels = labels
        self.newest: Snapshot | None = None
        self.samples = 0
        self._missed = 0
        self._interval_s = interval_s
        self._xids: dict[str, dict[int, int]] = {}

    def observe(self, snapshot: Snapshot) -> None:
        """Store the newest snapshot and count missed ones."""
        last = self.newest
        if last is not None:
            self._missed += max(0, round((snapshot.mono - last.mono) / self._interval_s) - 1)
        self.samples += 1
        self.newest = snapshot

    @property
    def missed(self) -> int:
        """Number of missed samples, including overdue ones, which are rounded down so that the count never falls."""
        last = self.newest
        overdue = 0 if last is None else int((clock.monotonic() - last.mono) / self._interval_s) - 1
        return self._missed + max(0, overdue)

    def watch_xids(self, uuids: Iterable[str]) -> None:
        """Start the error counts of these devices at 0."""
        for uuid in uuids:
            self._xids.setdefault(uuid, {})

    def record_xid(self, uuid: str, xid: int, count: int) -> None:
        """Count ``count`` new occurrences of an error on a device."""
        counts = dict(self._xids.get(uuid, {}))
        counts[xid] = counts.get(xid, 0) + count
        self._xids[uuid] = counts  # replaced, not modified: a scrape may be reading the old one

    def xid_counts(self, uuid: str) -> Mapping[int, int] | None:
        """Return the counts by XID; None if the device's errors are not watched."""
        return self._xids.get(uuid)

    def is_fresh(self, snapshot: Snapshot) -> bool:
        """Return whether the snapshot is recent enough to export."""
        return clock.monotonic() - snapshot.mono <= max(STALE_S, 5 * self._interval_s)
