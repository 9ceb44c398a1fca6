"""What the sampler's thread hands to the exporter's threads, without a lock between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from clustertrain import clock
from clustertrain.telemetry.snapshot import Snapshot

STALE_S = 30.0  # a snapshot that is older is no news of the GPUs: the sampler hangs in the driver, or has ended


class Labels(msgspec.Struct, frozen=True):
    """Those of every metric. ``job_id`` is empty where there is none."""

    run: str
    job_id: str
    attempt: int
    node: str


class Feed:
    """``newest`` and the counts. One thread writes; a reader may see a count that is one sample ahead of ``newest``."""

    def __init__(self, labels: Labels, interval_s: float) -> None:
        self.labels = labels
        self.newest: Snapshot | None = None
        self.samples = 0
        self._missed = 0
        self._interval_s = interval_s
        self._xids: dict[str, dict[int, int]] = {}

    def observe(self, snapshot: Snapshot) -> None:
        last = self.newest
        if last is not None:
            self._missed += max(0, round((snapshot.mono - last.mono) / self._interval_s) - 1)
        self.samples += 1
        self.newest = snapshot

    @property
    def missed(self) -> int:
        """So far, a sampler that hangs now included: what is due is rounded down, so that this never goes back."""
        last = self.newest
        overdue = 0 if last is None else int((clock.monotonic() - last.mono) / self._interval_s) - 1
        return self._missed + max(0, overdue)

    def watch_xids(self, uuids: Iterable[str]) -> None:
        for uuid in uuids:
            self._xids.setdefault(uuid, {})

    def record_xid(self, uuid: str, xid: int, count: int) -> None:
        counts = dict(self._xids.get(uuid, {}))
        counts[xid] = counts.get(xid, 0) + count
        self._xids[uuid] = counts  # a new one in place of the old: a scrape may be reading that

    def xid_counts(self, uuid: str) -> Mapping[int, int] | None:
        """By number; None where nobody watches for them."""
        return self._xids.get(uuid)

    def is_fresh(self, snapshot: Snapshot) -> bool:
        return clock.monotonic() - snapshot.mono <= max(STALE_S, 5 * self._interval_s)
