"""The status of a run for its page: asked anew when the run's files change, and now and then for the scheduler."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass

from clustertrain import clock
from clustertrain.report.progress import Progress, load_progress
from clustertrain.run import metrics, state
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.run_status import RunStatus, Unreadable, run_statuses
from clustertrain.ui.stamps import Stamp, status_files, take_stamp

SCHEDULER_INTERVAL_S = 15.0
MAX_SHARE = 1 / 20  # of the time, for status queries: a run of a thousand attempts must not keep the server busy


@dataclass(frozen=True)
class StatusView:
    """The status at one time."""

    t: float
    """UTC epoch s."""
    status: RunStatus | Unreadable
    progress: Progress

    @property
    def is_final(self) -> bool:
        return isinstance(self.status, RunStatus) and self.status.is_final


class StatusFeed:
    """The newest status of one run. Safe in threads."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._view: StatusView | None = None
        self._stamp: Stamp = ()
        self._metrics_stamp: Stamp = ()
        self._next_query = 0.0
        self._next_poll = 0.0
        self._thread: threading.Thread | None = None

    def get(self) -> StatusView:
        """Return the newest status; the first call reads the run."""
        with self._lock:
            if self._view is None:
                self._query()
            assert self._view is not None
            return self._view

    def get_soon(self, timeout_s: float) -> StatusView | None:
        """Return the status if it is known within ``timeout_s``: a scheduler may take long to answer."""
        if self._view is None:
            thread = threading.Thread(target=self.get, name="ui-run-status", daemon=True)
            thread.start()
            thread.join(timeout_s)
        return self._view

    def refresh(self) -> bool:
        """Return whether the status has changed since it was read first. What takes long continues in a thread."""
        before = self._view
        if before is None:
            return False
        if self._is_due() and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._query_locked, name="ui-run-status", daemon=True)
            self._thread.start()
            self._thread.join(0.2)  # mostly enough
        elif self._lock.acquire(blocking=False):
            try:
                self._follow_steps()
            finally:
                self._lock.release()
        return self._view is not before

    def _is_due(self) -> bool:
        now = clock.monotonic()
        if now < self._next_query:
            return False
        is_final = self._view is not None and self._view.is_final
        return (now >= self._next_poll and not is_final) or take_stamp(status_files(self._run)) != self._stamp

    def _query_locked(self) -> None:
        with self._lock:
            self._query()

    def _query(self) -> None:
        started = clock.monotonic()
        stamp = take_stamp(status_files(self._run))
        (status,) = run_statuses([self._run])
        now = clock.now()
        progress = Progress() if isinstance(status, Unreadable) else load_progress(status, now)
        view = StatusView(now, status, progress)
        self._stamp = stamp
        if self._view is None or not _is_same(view, self._view):
            self._view = view
        elapsed_s = clock.monotonic() - started
        self._next_query = clock.monotonic() + elapsed_s / MAX_SHARE
        self._next_poll = clock.monotonic() + max(SCHEDULER_INTERVAL_S, elapsed_s / MAX_SHARE)

    def _follow_steps(self) -> None:
        """Take the step, rate and loss from new metric rows, which costs little."""
        view = self._view
        if view is None or isinstance(view.status, Unreadable) or view.status.state != state.RUNNING:
            return
        attempts = self._run.attempts()
        stamp = take_stamp(self._run.metrics_files(attempts[-1].n) if attempts else ())
        if stamp == self._metrics_stamp:
            return
        self._metrics_stamp = stamp
        row = metrics.find_latest_row(self._run)
        if row is None:
            return
        now = clock.now()
        status = dataclasses.replace(view.status, step=int(row["step"]))
        new = StatusView(now, status, load_progress(status, now))
        if not _is_same(new, view):
            self._view = new


def _is_same(a: StatusView, b: StatusView) -> bool:
    return a.status == b.status and a.progress == b.progress
