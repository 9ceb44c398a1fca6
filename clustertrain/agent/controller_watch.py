"""The first node's agent outlives a batch process that is killed (by hand, or by the kernel's OOM killer). Slurm then
fails the job and ends its steps, and nobody decides about the run. So this agent asks Slurm to requeue the job, which
is accepted while the job is COMPLETING and after."""

from __future__ import annotations

import contextlib
import shutil
import socket

import psutil

from clustertrain import clock, fsio, settings
from clustertrain.agent.node_context import NodeContext
from clustertrain.errors import ClusterTrainError, CommandFailed
from clustertrain.run import endings, events
from clustertrain.run.events import EventLog
from clustertrain.scheduler.backend import RUNNING
from clustertrain.scheduler.slurm import SlurmBackend

RETRY_S = 1.0
SCHEDULER_TIMEOUT_S = 600.0  # as in sequel
# Slurm's reasons for a job whose batch script failed. There is none for a job that was cancelled.
_BATCH_FAILED = ("JobLaunchFailure", "RaisedSignal", "NonZeroExitCode", "OutOfMemory")


class ControllerWatch:
    """Looks after the batch process where it can be seen: from its own host, outside a PID namespace of a container."""

    def __init__(self, context: NodeContext, log: EventLog) -> None:
        self._run, self._attempt, self._log = context.run, context.attempt, log
        self._backend = SlurmBackend()
        self._job_id = self._backend.current_job_id(context.environ)
        self._process = self._find_controller(context)
        self.settled = False

    def _find_controller(self, context: NodeContext) -> psutil.Process | None:
        local = settings.LOCAL_JOB in context.environ
        if context.node_rank != 0 or local or self._job_id is None or shutil.which("scontrol") is None:
            return None
        record = fsio.poll_json(self._attempt.record) or {}
        with contextlib.suppress(psutil.Error, KeyError, ValueError, TypeError):
            process = psutil.Process(record["pid"])
            # In another PID namespace the number may be anybody's.
            if record["host"] == socket.gethostname() and {"clustertrain", "batch"} <= set(process.cmdline()):
                return process
        return None

    def is_gone(self) -> bool:
        """The batch process has been there and is not any more."""
        return self._process is not None and not self._process.is_running()

    def stop_other_nodes(self) -> None:
        """In its place: with slurmctld away no signal tells the other nodes."""
        with contextlib.suppress(OSError):
            fsio.write_json(self._attempt.stop_request, {"why": "the batch process was killed", "t": clock.now()})

    def ensure_requeued(self, timeout_s: float = 0.0) -> None:
        """Ask for the requeue, again for ``timeout_s`` while Slurm gives no answer or has not noticed."""
        deadline = clock.monotonic() + timeout_s
        while not self.settled:
            self.settled = self._is_decided() or self._try_requeue()
            if clock.monotonic() >= deadline:
                return
            clock.sleep(RETRY_S)

    def _is_decided(self) -> bool:
        """By the owner, by a newer attempt, or by the batch process before it ended."""
        with contextlib.suppress(OSError):
            if self._run.find_newer_attempt(self._attempt.n) is not None:
                return True
        return (
            self._run.cancel_marker.exists() or events.find_last(events.for_attempt(self._attempt), "ended") is not None
        )

    def _try_requeue(self) -> bool:
        job_id = str(self._job_id)
        try:
            view = self._backend.query_jobs([job_id]).get(job_id)
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
