"""The tracker interface, and the loop that uploads rows to a tracker until it is stopped."""

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

ErrorCallback = Callable[[str, str], None]  # (tracker, reason)


class Tracker(Protocol):
    """A destination for scalars; after any exception it is abandoned and opened again later."""

    name: str

    def open(self) -> int:
        """Find or create the run in the tracker; return the last step that it holds, -1 for none."""

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Upload rows of increasing steps, all after the one that :meth:`open` returned."""

    def close(self, ending: str | None) -> None:
        """Finish after the last row; ``ending`` is ``completed``, ``failed``, or None if the run will resume."""

    def abandon(self) -> None:
        """Release all resources after an error; must not raise."""


class TrackerState:
    """The upload state of one tracker, in ``tracking/state/<name>.json``."""

    def __init__(self, run: RunDir, name: str) -> None:
        self._path = run.tracking / "state" / f"{name}.json"

    def read(self) -> dict[str, Any]:
        """Return the state, empty if there is none yet or a machine crash left invalid JSON."""
        try:
            state = fsio.read_json(self._path)
        except ValueError:
            return {}
        return state if isinstance(state, dict) else {}

    def write(self, **values: Any) -> None:
        fsio.make_folder(self._path.parent)
        fsio.write_json(self._path, values)


class TrackerUploader:
    """Uploader of the rows of ``run`` to one tracker, in a thread, so that a slow server delays no other tracker.

    Args:
        get_ending: called after the last row.
        retry: whether to retry after an error; otherwise the first error ends the upload.
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
        self._has_logged = False  # rows were accepted since the tracker was opened
        self._was_reopened = False  # the tracker was reopened since it accepted rows
        self.failed = False
        self.last_step = -1  # the last uploaded step
        self.thread = threading.Thread(target=self._run_loop, name=f"tracking-{tracker.name}", daemon=True)

    def request_stop(self) -> None:
        """Ask the thread to upload the rows written so far and then end."""
        self._stop.set()

    def _run_loop(self) -> None:
        wait_s = RETRY_FIRST_S
        while True:
            try:
                self._upload_until_stopped()
                return
            except Exception as e:  # the edge of a thread and of a library, whose errors must not end the process
                self._tracker.abandon()
                if self._has_logged or (isinstance(e, ConnectionError) and not self._was_reopened):
                    # The preemption signal goes to all processes of a job, and terminates W&B's service.
                    print(f"clustertrain tracking: reopening {self._tracker.name}: {e}", file=sys.stderr, flush=True)
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
            is_stopping = self._stop.is_set()  # read before the rows, so that no row written earlier is missed
            rows = follower.read()
            if rows:
                self._log_rows(rows)
            elif is_stopping:
                ending = self._get_ending()
                if ending is not None and (pending := follower.take_pending()):
                    self._log_rows(pending)
                self._tracker.close(ending)
                self.failed = False
                return
            else:
                self._stop.wait(POLL_S)

    def _log_rows(self, rows: Sequence[Row]) -> None:
        self._tracker.log_rows(rows)
        self.last_step = rows[-1]["step"]
        if self._last_error is not None:
            print(f"clustertrain tracking: {self._tracker.name} works again", file=sys.stderr, flush=True)
        self._last_error, self.failed, self._has_logged, self._was_reopened = None, False, True, False

    def _report_error(self, e: Exception) -> None:
        """Report consecutive errors of one type once, so that a long server outage is one line."""
        reason = f"{type(e).__name__}: {e}".strip()
        if type(e).__name__ != self._last_error:
            traceback.print_exception(e, limit=-4, file=sys.stderr)
            self._on_error(self._tracker.name, reason)
        self._last_error = type(e).__name__


def make_tracker_dir(run: RunDir, name: str) -> Path:
    """Return the folder of a tracker in the run folder; create it if it is missing."""
    path = run.tracking / name
    fsio.make_folder(path)
    return path
