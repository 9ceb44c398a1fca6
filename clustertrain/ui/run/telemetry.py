"""The telemetry of a run for its page: computed in a child process, kept, and computed anew when the run has recorded
more."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from clustertrain import clock, reading
from clustertrain.errors import ClusterTrainError, CommandFailed
from clustertrain.run.run_dir import RunDir
from clustertrain.ui.run import workers
from clustertrain.ui.run.status import StatusFeed
from clustertrain.ui.stamps import Stamp, status_files, take_stamp

MIN_INTERVAL_S = 10.0  # between two computations
MAX_SHARE = 1 / 10  # of the time, for computations
_LIMIT = threading.Semaphore(2)  # computations of all runs at the same time


class TelemetryFeed:
    """The newest summary of one run's telemetry. Safe in threads."""

    def __init__(self, run: RunDir, status: StatusFeed, should_cancel: Callable[[], bool]) -> None:
        self._run, self._status, self._should_cancel = run, status, should_cancel
        self._lock = threading.Lock()
        self._document = b""
        self._error: ClusterTrainError | None = None
        self._stamp: Stamp | None = None
        self._next_s = 0.0
        self._thread: threading.Thread | None = None
        self.version = 0
        """Counts the computed summaries. 0: none yet."""

    def get(self) -> bytes:
        """Return the newest summary as JSON, see :func:`clustertrain.ui.run.gpus.describe`; wait for the first one.

        Raises:
            CommandFailed: it cannot be computed.
        """
        if self.version == 0:
            self.start_if_due()
            thread = self._thread
            if thread is not None:
                thread.join()
        if self._error is not None and not self._document:
            raise self._error
        return self._document

    def start_if_due(self) -> None:
        """Start to compute if the run has recorded more since, in a thread."""
        with self._lock:
            if (self._thread is not None and self._thread.is_alive()) or clock.monotonic() < self._next_s:
                return
            self._next_s = clock.monotonic() + MIN_INTERVAL_S
            stamp = take_stamp(_telemetry_files(self._run))
            if stamp == self._stamp:
                return
            self._thread = threading.Thread(target=self._compute, args=(stamp,), name="ui-telemetry", daemon=True)
            self._thread.start()

    def _compute(self, stamp: Stamp) -> None:
        started = clock.monotonic()
        with _LIMIT:
            state = getattr(self._status.get().status, "state", None)
            request = workers.SummaryRequest(run=os.fsencode(self._run.path), state=state)
            try:
                document = workers.call(request, workers.SUMMARY_TIMEOUT_S, self._should_cancel)
                error = None
            except (ClusterTrainError, OSError) as e:
                document, error = b"", CommandFailed(f"the telemetry cannot be summarized: {e}")
        with self._lock:
            self._stamp, self._error = stamp, error
            self._document = document or self._document
            self.version += 1
            elapsed_s = clock.monotonic() - started
            self._next_s = clock.monotonic() + max(MIN_INTERVAL_S, elapsed_s / MAX_SHARE)


def _telemetry_files(run: RunDir) -> Iterator[Path]:
    """Yield what the summary depends on. Attempts before the newest one do not change."""
    yield from status_files(run)
    for attempt in run.attempts()[-1:]:
        yield from run.metrics_files(attempt.n)
        yield attempt.telemetry
        yield from _list_segments(attempt.telemetry)


def _list_segments(folder: Path) -> list[Path]:
    try:
        nodes = sorted(p for p in folder.iterdir() if p.is_dir())
        return [s for node in nodes for s in sorted(node.iterdir()) if reading.is_unsigned_int(s.name)]
    except OSError:
        return []
