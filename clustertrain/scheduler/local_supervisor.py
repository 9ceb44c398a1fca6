"""The detached process that plays slurmctld for one local job.

``python -m clustertrain.scheduler.local_supervisor FOLDER``.
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
from clustertrain.config.time_limits import seconds_of
from clustertrain.errors import CommandFailed
from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import COMPLETING, PENDING, RUNNING
from clustertrain.scheduler.local import JobFolder, LocalBackend, LocalJob, folder_of

POLL_S = 0.1
TURN_S = 0.5
KILL_WAIT_S = 30.0  # Slurm's default between SIGTERM and SIGKILL


class Supervisor:
    def __init__(self, folder: JobFolder, job: LocalJob) -> None:
        self.folder = folder
        self.job = job
        self.run = RunDir(Path(job.run_dir))
        self.rehearsed = 0
        self.kill_at: float | None = None
        self.killed = False

    def main(self) -> None:
        me = psutil.Process()
        self.job.pid, self.job.pid_created, self.job.host = me.pid, me.create_time(), socket.gethostname()
        self.folder.write(self.job)
        self._wait_for_turn()
        while self._start_once():
            self.job.restarts += 1
            self.job.preempt_time = None
            self._say(PENDING, "requeued")

    def _say(self, state: str, reason: str = "") -> None:
        self.job.state, self.job.reason = state, reason
        self.folder.write(self.job)

    def _wait_for_turn(self) -> None:
        """Until the job before this one is over; where that was cancelled while it waited, the one before it."""
        before = self.job.after
        while before:
            self._say(PENDING, f"waits for {before}")
            while _alive(before):
                if self.folder.cancel.exists():
                    return
                clock.sleep(TURN_S)
            ended = folder_of(before).read()
            before = ended.after if ended is not None and ended.start_time is None else ""

    def _start_once(self) -> bool:
        """One start of job.sh, to its end. Returns whether there is to be another."""
        if self.folder.cancel.exists():
            self._say("CANCELLED", "cancelled while pending")
            return False
        self.folder.requeue.unlink(missing_ok=True)
        self.kill_at, self.killed = None, False
        start = clock.now()
        self.job.start_time = start
        self.job.end_time = start + self.job.time_limit_s if self.job.time_limit_s else None
        self._say(RUNNING)
        env = {**os.environ, settings.LOCAL_JOB: str(self.folder.path)}
        batch = proc.start(
            ["/bin/bash", self.run.script], env=env, cwd=self.run.path, log=self.run.job_log, new_session=True
        )
        ended_by = ""
        while batch.poll() is None:
            ended_by = self._look(ended_by)
            clock.wait_until(lambda: batch.poll() is not None, POLL_S, POLL_S)
        proc.kill_descendants()
        return self._finish(batch.returncode, ended_by, start)

    def _look(self, ended_by: str) -> str:
        now = clock.now()
        if self.kill_at is not None and now >= self.kill_at:
            self.killed = True
            proc.kill_descendants()
            self.kill_at = None
        if ended_by:
            return ended_by
        if self.folder.cancel.exists():
            return self._warn("CANCELLED", KILL_WAIT_S, COMPLETING)
        if self.job.end_time is not None and now >= self.job.end_time:
            return self._warn("TIMEOUT", KILL_WAIT_S, COMPLETING)
        if self._rehearsal_due():
            self.rehearsed += 1
            self.job.preempt_time = now
            return self._warn("PREEMPTED", self.job.grace_s, RUNNING)
        return ""

    def _warn(self, why: str, grace_s: float, state: str) -> str:
        """SIGTERM to every process of the step, the kill after the grace time, as slurmd does it."""
        self.kill_at = clock.now() + grace_s
        self._say(state, why)
        for child in proc.descendants():
            proc.send_signal(child, signal.SIGTERM)
        return why

    def _rehearsal_due(self) -> bool:
        steps = self.job.preempt_at_steps
        if self.rehearsed >= len(steps):
            return False
        row = metrics.latest(self.run)
        # A row of an earlier attempt is not a step of this one.
        return row is not None and row["t"] >= (self.job.start_time or 0) and row["step"] >= steps[self.rehearsed]

    def _tell_of_missed_rehearsals(self, steps: Sequence[int]) -> None:
        """A run of quick steps may be over before the warning: whoever rehearses must not take it for preempted."""
        if not steps:
            return
        said = f"rehearsal.preempt_at_steps: the job ended before it was preempted at {', '.join(map(str, steps))}"
        with suppress(OSError), self.run.job_log.open("a") as log:
            log.write(f"clustertrain: {said}\n")

    def _finish(self, code: int, ended_by: str, start: float) -> bool:
        asked = fsio.peek_json(self.folder.requeue)
        again = asked is not None and ended_by != "CANCELLED"
        if again:
            state = "REQUEUED"
            if asked and asked.get("time"):
                self.job.time_limit_s = seconds_of(asked["time"])
        elif ended_by:
            state = ended_by
            # As Slurm does with a preempted job that did not leave by itself in the grace time.
            again = ended_by == "PREEMPTED" and self.killed
        else:
            state = "COMPLETED" if code == 0 else "FAILED"
        if code == 0 and not again and state in ("COMPLETED", "PREEMPTED"):
            in_vain = int(state == "PREEMPTED")  # it was done before the warning had an effect
            self._tell_of_missed_rehearsals(self.job.preempt_at_steps[self.rehearsed - in_vain :])
        record = {
            "state": state,
            "start": start,
            "end": clock.now(),
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
        }
        self.job.starts = [*self.job.starts, record]
        self.job.end_time = None
        self._say(PENDING if again else state, ended_by)
        return again


def _alive(job_id: str) -> bool:
    try:
        view = LocalBackend().views([job_id]).get(job_id)
    except CommandFailed:
        return False  # it runs on another machine, where it is in nobody's way here, or does not read
    return view is not None and view.alive


def main() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    proc.adopt_orphans()
    folder = JobFolder(Path(sys.argv[1]))
    job = folder.read()
    if job is None:
        print(f"{folder.record} is missing", file=sys.stderr)
        return 1
    Supervisor(folder, job).main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
