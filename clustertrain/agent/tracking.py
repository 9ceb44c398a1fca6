"""The tracking process, which uploads scalars to trackers: started, restarted and ended by the first node's agent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from clustertrain import clock, proc
from clustertrain.errors import ClusterTrainError
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.run.run_spec import load_spec

# For the upload of the last rows; with compaction, less than AFTER_RESULTS_S of the batch process.
TRACKING_STOP_S = 15.0
HURRIED_TRACKING_STOP_S = 2.0  # while the job is being ended; later uploads start from the rows
RESTART_S, MAX_RESTARTS = 10.0, 5
_POLL_S = 0.05


class TrackingProcess:
    """The tracking process. Its failures never end or delay the run: each is written as an event and to the log."""

    def __init__(self, run: RunDir, attempt: AttemptDir, environ: Mapping[str, str], log: EventLog) -> None:
        self._run = run
        self._argv = proc.python_module_argv(
            sys.executable, "clustertrain.tracking", str(run.path), "--attempt", str(attempt.n)
        )
        self._log_file = attempt.logs / "tracking.log"
        self._environ = dict(environ)
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._restarts = 0
        self._restart_at: float | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        try:
            if not load_spec(self._run).recipe.tracking.trackers:
                return
        except (ClusterTrainError, OSError) as e:  # the batch process has read it
            self._report_failure(f"its settings cannot be read: {e}")
            return
        try:
            # It ignores signals meant for the ranks, because it must still read their last rows. It ends when its input
            # closes.
            self._child = proc.start(
                self._argv, env=self._environ, log=self._log_file, ignore_stop_signals=True, keep_stdin_open=True
            )
        except OSError as e:  # the limit on processes is reached, or the disk full
            self._report_failure(f"the process could not be started: {e}")

    def poll(self) -> None:
        """Restart the process if it was killed. Call it regularly while the ranks run."""
        if self._child is None:
            if self._restart_at is not None and clock.monotonic() >= self._restart_at:
                self._restart_at = None
                self.start()
            return
        code = self._child.poll()
        if code is None:
            return
        self._close_input()
        self._child = None
        # Only if it was killed: a process that exits has logged why.
        should_restart = code < 0 and self._restarts < MAX_RESTARTS
        self._report_failure(
            f"the process ended with code {code}" + ("" if should_restart else ", and is not started again")
        )
        if should_restart:
            self._restarts += 1
            self._restart_at = clock.monotonic() + RESTART_S

    def request_stop(self) -> None:
        """Ask the process to upload the remaining rows and end; do not wait for it."""
        self._restart_at = None
        self._close_input()

    def stop(self, timeout_s: float) -> None:
        """Kill the process and its children after ``timeout_s``; a later upload starts from the rows."""
        self.request_stop()
        child, self._child = self._child, None
        if child is None:
            return
        if not clock.wait_until(lambda: child.poll() is not None, timeout_s, _POLL_S):
            self._report_failure(
                f"not finished after {timeout_s:g} s; the next attempt or `clustertrain track` uploads the rest"
            )
        proc.kill_process_tree(child)

    def _close_input(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()

    def _report_failure(self, reason: str) -> None:
        self._log.write("tracking_failed", tracker=None, reason=reason)
        print(f"clustertrain agent: tracking: {reason}", file=sys.stderr, flush=True)
