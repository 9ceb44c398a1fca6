"""Everything that the open pages of one run share, and the changes that they receive."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from clustertrain import reading
from clustertrain.errors import ClusterTrainError
from clustertrain.run.run_dir import RunDir
from clustertrain.ui.live import Change
from clustertrain.ui.run import overview
from clustertrain.ui.run.metrics import MetricCurves
from clustertrain.ui.run.status import StatusFeed
from clustertrain.ui.run.telemetry import TelemetryFeed
from clustertrain.ui.run.timeline import TimelineFeed

MAX_FEEDS = 16  # runs that are kept in memory


class RunFeed:
    """One run: a :class:`clustertrain.ui.live.Topic`.

    A cursor has the versions of the parts that a page has: ``boot-status-generation-rows-timeline-telemetry``.
    """

    def __init__(self, run: RunDir, should_cancel: Callable[[], bool] = lambda: False) -> None:
        self.run = run
        self.status = StatusFeed(run)
        self.curves = MetricCurves(run)
        self.timeline = TimelineFeed(run)
        self.telemetry = TelemetryFeed(run, self.status, should_cancel)
        self._boot = secrets.token_hex(4)  # cursors of another server are unknown
        self._status_version = 1
        self._telemetry_version = 0
        self._is_deleted = False

    def refresh(self) -> bool:
        if self._is_deleted != (is_deleted := not self.run.spec.exists()):
            self._is_deleted = is_deleted
            return True
        if self._is_deleted:
            return False
        has_status = _without_errors(self.status.refresh)
        self._status_version += has_status
        _without_errors(self.telemetry.start_if_due)
        has_telemetry = self._telemetry_version != self.telemetry.version
        self._telemetry_version = self.telemetry.version
        has_events = _without_errors(self.timeline.refresh)
        has_rows = _without_errors(lambda: self.curves.update(wait=False))
        return has_status or has_telemetry or has_events or has_rows

    @property
    def cursor(self) -> str:
        """Return the versions of all parts."""
        numbers = (
            self._status_version,
            self.curves.generation,
            self.curves.num_rows,
            self.timeline.version,
            self._telemetry_version,
        )
        return "-".join([self._boot, *map(str, numbers)])

    def changes_since(self, cursor: str | None) -> Change | None:
        """Return what is new: ``status``, the ``rows`` up to number ``rows_end``, and which parts to ask for again."""
        if self._is_deleted:
            return None if cursor == "deleted" else Change({"deleted": True}, "deleted")
        current = self.cursor
        if cursor == current:
            return None
        numbers = (cursor or "").split("-")
        is_known = numbers[0] == self._boot and len(numbers) == 6 and all(map(reading.is_unsigned_int, numbers[1:]))
        known = [int(n) for n in numbers[1:]] if is_known else [0, -1, -1, -1, -1]
        new = [int(n) for n in current.split("-")[1:]]
        data: dict[str, Any] = {}
        if known[0] != new[0]:
            data["status"] = overview.describe(self.status.get())
        if known[1:3] != new[1:3]:
            rows = self.curves.rows_after(known[1], known[2])
            # The rows may be newer than the cursor by now.
            rows = rows[: new[2] - known[2]] if rows is not None else None
            data |= {"rows": rows} if rows is not None else {"curves": "changed"}
            data |= {"generation": new[1], "rows_end": new[2]}
        if known[3] != new[3]:
            data["timeline"] = "changed"
        if known[4] != new[4]:
            data["telemetry"] = "changed"
        return Change(data, current)


def _without_errors(refresh: Callable[[], bool | None]) -> bool:
    """Return whether a part has changed; if it cannot be read, the page's request for it says why."""
    try:
        return bool(refresh())
    except (ClusterTrainError, OSError):
        return False


class Feeds:
    """The feeds of the runs that were opened last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._feeds: OrderedDict[RunDir, RunFeed] = OrderedDict()

    def get(self, run: RunDir, should_cancel: Callable[[], bool]) -> RunFeed:
        """Return the feed of a run, which all its pages share."""
        with self._lock:
            feed = self._feeds.pop(run, None) or RunFeed(run, should_cancel)
            self._feeds[run] = feed
            while len(self._feeds) > MAX_FEEDS:
                self._feeds.popitem(last=False)
            return feed
