"""A tracker, and the loop that hands it the rows until it is told to end."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from clustertrain import fsio
from clustertrain.run.run_dir import RunDir
from clustertrain.tracking.row_follower import Row, RowFollower

POLL_S = 2.0
RETRY_FIRST_S, RETRY_MOST_S = 15.0, 600.0

ErrorCallback = Callable[[str, str], None]  # the tracker's name, and what is wrong


class Tracker(Protocol):
    """One place that scalars go to. Whatever it raises, it is abandoned and opened again later."""

    name: str

    def open(self) -> int:
        """Connect to the run's place there, or make it; the last step that it holds, -1 for none."""

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Rows of rising steps, all after what :meth:`open` gave."""

    def close(self, ending: str | None) -> None:
        """All rows are handed on. ``ending``: ``completed`` or ``failed``; None: the run goes on later."""

    def abandon(self) -> None:
        """After an error: give back what is held. Must not raise."""


class TrackerState:
    """What one tracker has been handed, in ``tracking/state/<name>.json``."""

    def __init__(self, run: RunDir, name: str) -> None:
        self._path = run.tracking / "state" / f"{name}.json"

    def read(self) -> dict[str, Any]:
        """Empty where there is none yet, or a crash of the machine has left no JSON."""
        try:
            state = fsio.read_json(self._path)
        except ValueError:
            return {}
        return state if isinstance(state, dict) else {}

    def write(self, **values: Any) -> None:
        fsio.make_folder(self._path.parent)
        fsio.write_json(self._path, values)


class TrackerUploader:
    """Hands the rows of ``run`` to one tracker, in a thread: one that waits for a server holds up no other.

    Args:
        ending: asked when all has been handed on.
        again: whether to try again after an error; else the first one ends it.
    """

    def __init__(
        self,
        run: RunDir,
        tracker: Tracker,
        on_error: ErrorCallback,
        *,
        get_ending: Callable[[], str | None],
        retry: bool = True,
    ) -> None:
        self._run = run
        self._tracker = tracker
        self._on_error = on_error
        self._get_ending = get_ending
        self._retry = retry
        self._stop = threading.Event()
        self._last_error: str | None = None
        self._has_logged = False  # it took rows since it was last opened
        self._was_reopened = False  # it was opened anew since it last took rows
        self.failed = False
        self.last_step = -1  # step that the tracker has
        self.thread = threading.Thread(target=self._run_loop, name=f"tracking-{tracker.name}", daemon=True)

    def request_stop(self) -> None:
        """Hand on what is written by now, and end."""
        self._stop.set()

    def _run_loop(self) -> None:
        wait_s = RETRY_FIRST_S
        while True:
            try:
                self._upload_until_stopped()
                return
            except Exception as e:  # a thread's edge, and a library's: what goes wrong there must not end a run
                self._tracker.abandon()
                if self._has_logged or (isinstance(e, ConnectionError) and not self._was_reopened):
                    # The warning of a preemption goes to all processes of a job, and W&B's service ends of it.
                    print(
                        f"clustertrain tracking: {self._tracker.name} is opened anew: {e}", file=sys.stderr, flush=True
                    )
                    self._has_logged, self._was_reopened = False, True
                    continue
                self.failed = True
                self._report_error(e)
            if not self._retry or self._stop.wait(wait_s):
                return
            wait_s = min(2 * wait_s, RETRY_MOST_S)

    def _upload_until_stopped(self) -> None:
        self.last_step = self._tracker.open()
        follower = RowFollower(self._run, self.last_step)
        while True:
            is_stopping = self._stop.is_set()  # asked first: then all that was written before it is read
            rows = follower.read()
            if rows:
                self._log_rows(rows)
            elif is_stopping:
                outcome = self._get_ending()
                if outcome is not None and (pending := follower.take_pending()):
                    self._log_rows(pending)
                self._tracker.close(outcome)
                self.failed = False
                return
            else:
                self._stop.wait(POLL_S)

    def _log_rows(self, rows: Sequence[Row]) -> None:
        self._tracker.log_rows(rows)
        self.last_step = rows[-1]["step"]
        if self._last_error is not None:
            print(f"clustertrain tracking: {self._tracker.name} goes on", file=sys.stderr, flush=True)
        self._last_error, self.failed, self._has_logged, self._was_reopened = None, False, True, False

    def _report_error(self, e: Exception) -> None:
        """Once for each kind of error in a row: a server that is away for a day is one line."""
        reason = f"{type(e).__name__}: {e}".strip()
        if type(e).__name__ != self._last_error:
            traceback.print_exception(e, limit=-4, file=sys.stderr)
            self._on_error(self._tracker.name, reason)
        self._last_error = type(e).__name__


def make_tracker_dir(run: RunDir, name: str) -> Path:
    """A tracker's own folder in the run's, made where it is missing."""
    path = run.tracking / name
    fsio.make_folder(path)
    return path
