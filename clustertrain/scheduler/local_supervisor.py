"""The detached process that stands in for slurmctld, for one local job.

``python -m clustertrain.scheduler.local_supervisor FOLDER``
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from clustertrain import clock, fsio, proc, settings
from clustertrain.config.parsing.time_limits import parse_time_limit_s
from clustertrain.errors import CommandFailed
from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import COMPLETING, PENDING, RUNNING
from clustertrain.scheduler.local import JobFolder, LocalBackend, LocalJob, job_folder

POLL_S = 0.1
TURN_POLL_S = 0.5
KILL_WAIT_S = 30.0  # Slurm's default between SIGTERM and SIGKILL


class LocalSupervisor:
    """The supervisor of one local job."""

    def __init__(self, folder: JobFolder, job: LocalJob) -> None:
        self.folder = folder
        self.job = job
        self.run = RunDir(Path(job.run_dir))
        self.preemptions_sent = 0
        self.kill_at: float | None = None
        self.killed = False

    def main(self) -> None:
        """Run the job to its end, with all restarts."""
        process = psutil.Process()
        self.job.pid, self.job.pid_created, self.job.host = process.pid, process.create_time(), socket.gethostname()
        self.folder.write(self.job)
        self._wait_for_turn()
        while self._run_once():
            self.job.restarts += 1
            self.job.preempt_time = None
            self._set_state(PENDING, "requeued")

    def _set_state(self, state: str, reason: str = "") -> None:
        self.job.state, self.job.reason = state, reason
        self.folder.write(self.job)

    def _wait_for_turn(self) -> None:
        """Wait for the preceding job of the sweep; if that was cancelled in the queue, for the one before it."""
        predecessor = self.job.depends_on
        while predecessor:
            self._set_state(PENDING, f"waits for {predecessor}")
            while _is_alive(predecessor):
                if self.folder.cancel_file.exists():
                    return
                clock.sleep(TURN_POLL_S)
            ended_job = job_folder(predecessor).read()
            predecessor = ended_job.depends_on if ended_job is not None and ended_job.start_time is None else ""

    def _run_once(self) -> bool:
        """Run job.sh once; return whether to start it again."""
        if self.folder.cancel_file.exists():
            self._set_state("CANCELLED", "cancelled while pending")
            return False
        self.folder.requeue_file.unlink(missing_ok=True)
        self.kill_at, self.killed = None, False
        start = clock.now()
        self.job.start_time = start
        self.job.end_time = start + self.job.time_limit_s if self.job.time_limit_s else None
        self._set_state(RUNNING)
        env = {**os.environ, settings.LOCAL_JOB: str(self.folder.path)}
        job_script = proc.start(
            ["/bin/bash", self.run.job_script], env=env, cwd=self.run.path, log=self.run.job_log, new_session=True
        )
        end_state = ""
        while job_script.poll() is None:
            end_state = self._poll_job(end_state)
            clock.wait_until(lambda: job_script.poll() is not None, POLL_S, POLL_S)
        proc.kill_descendants()
        return self._finish(job_script.returncode, end_state, start)

    def _poll_job(self, end_state: str) -> str:
        now = clock.now()
        if self.kill_at is not None and now >= self.kill_at:
            self.killed = True
            proc.kill_descendants()
            self.kill_at = None
        if end_state:
            return end_state
        if self.folder.cancel_file.exists():
            return self._send_sigterm("CANCELLED", KILL_WAIT_S, COMPLETING)
        if self.job.end_time is not None and now >= self.job.end_time:
            return self._send_sigterm("TIMEOUT", KILL_WAIT_S, COMPLETING)
        if self._is_preemption_due():
            self.preemptions_sent += 1
            self.job.preempt_time = now
            return self._send_sigterm("PREEMPTED", self.job.grace_s, RUNNING)
        return ""

    def _send_sigterm(self, end_state: str, grace_s: float, state: str) -> str:
        """Send SIGTERM to every process of the step and schedule the kill after the grace time, as slurmd does."""
        self.kill_at = clock.now() + grace_s
        self._set_state(state, end_state)
        for child in proc.list_descendants():
            proc.send_signal(child, signal.SIGTERM)
        return end_state

    def _is_preemption_due(self) -> bool:
        steps = self.job.preempt_at_steps
        if self.preemptions_sent >= len(steps):
            return False
        row = metrics.find_latest_row(self.run)
        # The row may be of an earlier attempt.
        return (
            row is not None and row["t"] >= (self.job.start_time or 0) and row["step"] >= steps[self.preemptions_sent]
        )

    def _log_missed_preemptions(self, steps: Sequence[int]) -> None:
        """Log preemptions that did not happen because the run ended first: the test has then shown nothing."""
        if not steps:
            return
        message = (
            f"preemption_test.preempt_at_steps: the job ended before it was preempted at {', '.join(map(str, steps))}"
        )
        with suppress(OSError), self.run.job_log.open("a") as log:
            log.write(f"clustertrain: {message}\n")

    def _finish(self, code: int, end_state: str, start: float) -> bool:
        request = fsio.poll_json(self.folder.requeue_file)
        should_restart = request is not None and end_state != "CANCELLED"
        if should_restart:
            state = "REQUEUED"
            if request and request.get("time"):
                self.job.time_limit_s = parse_time_limit_s(request["time"])
        elif end_state:
            state = end_state
            # As Slurm does with a preempted job that did not end within the grace time.
            should_restart = end_state == "PREEMPTED" and self.killed
        else:
            state = "COMPLETED" if code == 0 else "FAILED"
        if code == 0 and not should_restart and state in ("COMPLETED", "PREEMPTED"):
            ineffective = int(state == "PREEMPTED")  # it completed before the warning took effect
            self._log_missed_preemptions(self.job.preempt_at_steps[self.preemptions_sent - ineffective :])
        record = {
            "state": state,
            "start": start,
            "end": clock.now(),
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
        }
        self.job.starts = [*self.job.starts, record]
        self.job.end_time = None
        self._set_state(PENDING if should_restart else state, end_state)
        return should_restart


def _is_alive(job_id: str) -> bool:
    try:
        view = LocalBackend().query_jobs([job_id]).get(job_id)
    except CommandFailed:
        return False  # unreadable, or on another machine, so that it does not block this one
    return view is not None and view.is_alive


def main() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    proc.become_subreaper()
    folder = JobFolder(Path(sys.argv[1]))
    job = folder.read()
    if job is None:
        print(f"{folder.record_file} is missing", file=sys.stderr)
        return 1
    LocalSupervisor(folder, job).main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
