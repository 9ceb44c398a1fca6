"""The first node's agent outlives a batch process that is killed (by hand, or by the kernel's OOM killer). Slurm then
fails the job and ends its steps, and nobody decides about the run. So this agent asks Slurm to requeue the job, which
is accepted while the job is COMPLETING and after."""

from __future__ import annotations

import contextlib
import shutil
import socket

import psutil

from clustertrain import clock, fsio, settings
from clustertrain.agent.node_context import Place
from clustertrain.errors import ClusterTrainError, CommandFailed
from clustertrain.run import endings, events
from clustertrain.run.events import EventLog
from clustertrain.scheduler.backend import RUNNING
from clustertrain.scheduler.slurm import SlurmBackend

RETRY_S = 1.0
NO_ANSWER_S = 600.0  # as in sequel
# Slurm's reasons for a job whose batch script failed. There is none for a job that was cancelled.
_BATCH_FAILED = ("JobLaunchFailure", "RaisedSignal", "NonZeroExitCode", "OutOfMemory")


class BatchWatch:
    """Looks after the batch process where it can be seen: from its own host, outside a PID namespace of a container."""

    def __init__(self, place: Place, log: EventLog) -> None:
        self._run, self._attempt, self._log = place.run, place.attempt, log
        self._backend = SlurmBackend()
        self._job_id = self._backend.own_job_id(place.environ)
        self._process = self._batch(place)
        self.settled = False

    def _batch(self, place: Place) -> psutil.Process | None:
        local = settings.LOCAL_JOB in place.environ
        if place.node_rank != 0 or local or self._job_id is None or shutil.which("scontrol") is None:
            return None
        record = fsio.peek_json(self._attempt.record) or {}
        with contextlib.suppress(psutil.Error, KeyError, ValueError, TypeError):
            process = psutil.Process(record["pid"])
            # In another PID namespace the number may be anybody's.
            if record["host"] == socket.gethostname() and {"clustertrain", "batch"} <= set(process.cmdline()):
                return process
        return None

    def gone(self) -> bool:
        """The batch process has been there and is not any more."""
        return self._process is not None and not self._process.is_running()

    def stop_others(self) -> None:
        """In its place: with slurmctld away no signal tells the other nodes."""
        with contextlib.suppress(OSError):
            fsio.write_json(self._attempt.stop, {"why": "the batch process was killed", "t": clock.now()})

    def settle(self, patience_s: float = 0.0) -> None:
        """Ask for the requeue, again for ``patience_s`` while Slurm gives no answer or has not noticed."""
        deadline = clock.monotonic() + patience_s
        while not self.settled:
            self.settled = self._decided() or self._ask()
            if clock.monotonic() >= deadline:
                return
            clock.sleep(RETRY_S)

    def _decided(self) -> bool:
        """By the owner, by a newer attempt, or by the batch process before it ended."""
        with contextlib.suppress(OSError):
            if self._run.newer_attempt(self._attempt.n) is not None:
                return True
        return self._run.cancelled.exists() or events.last(events.of_attempt(self._attempt), "ended") is not None

    def _ask(self) -> bool:
        job_id = str(self._job_id)
        try:
            view = self._backend.views([job_id]).get(job_id)
            if view is not None and view.state == RUNNING:
                return False
            if view is None or not view.reason.startswith(_BATCH_FAILED):
                return True  # something else ends the job
            self._backend.requeue(job_id)
        except CommandFailed:
            return False
        except ClusterTrainError:
            return True  # `status` says what to type
        reason = f"its batch process was killed (the scheduler says {view.reason})"
        self._log.write("ended", ending=endings.UNKNOWN, reason=reason, last_step=None, job_id=job_id)
        self._log.write("requeued", how="requeue", job_id=job_id)
        return True
