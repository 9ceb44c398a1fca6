"""Requeue of a job whose batch process was killed, by the first node's agent.

If the batch process is killed (by hand, or by the kernel's OOM killer), Slurm fails the job and ends its steps, and
nothing decides about the run. The agent outlives it and requests a requeue, which Slurm accepts while the job is
COMPLETING and after.
"""

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
SCHEDULER_TIMEOUT_S = 600.0  # as in agent/requeue
# Slurm's reasons for a job whose batch script failed; a cancelled job has none.
_BATCH_FAILED = ("JobLaunchFailure", "RaisedSignal", "NonZeroExitCode", "OutOfMemory")


class BatchProcessWatch:
    """Watch of the batch process, if it runs on this host and in the same PID namespace."""

    def __init__(self, context: NodeContext, log: EventLog) -> None:
        self._run, self._attempt, self._log = context.run, context.attempt, log
        self._backend = SlurmBackend()
        self._job_id = self._backend.current_job_id(context.environ)
        self._process = self._find_batch_process(context)
        self.settled = False

    def _find_batch_process(self, context: NodeContext) -> psutil.Process | None:
        local = settings.LOCAL_JOB in context.environ
        if context.node_rank != 0 or local or self._job_id is None or shutil.which("scontrol") is None:
            return None
        record = fsio.poll_json(self._attempt.record) or {}
        with contextlib.suppress(psutil.Error, KeyError, ValueError, TypeError):
            process = psutil.Process(record["pid"])
            # In another PID namespace the pid may belong to another process.
            if record["host"] == socket.gethostname() and {"clustertrain", "batch"} <= set(process.cmdline()):
                return process
        return None

    def is_gone(self) -> bool:
        """Return whether the batch process was found at the start and no longer runs."""
        return self._process is not None and not self._process.is_running()

    def stop_other_nodes(self) -> None:
        """Write the stop request in place of the batch process: without slurmctld, other nodes get no signal."""
        with contextlib.suppress(OSError):
            fsio.write_json(self._attempt.stop_request, {"reason": "the batch process was killed", "t": clock.now()})

    def ensure_requeued(self, timeout_s: float = 0.0) -> None:
        """Request the requeue; retry for ``timeout_s`` while Slurm does not answer or lists the job as running."""
        deadline = clock.monotonic() + timeout_s
        while not self.settled:
            self.settled = self._is_decided() or self._try_requeue()
            if clock.monotonic() >= deadline:
                return
            clock.sleep(RETRY_S)

    def _is_decided(self) -> bool:
        """Return whether the owner, a newer attempt or the batch process has already decided about the run."""
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
                return True  # the job ends for another reason
            self._backend.requeue(job_id)
        except CommandFailed:
            return False
        except ClusterTrainError:
            return True  # `status` shows the command that continues the run
        reason = f"its batch process was killed (the scheduler reports {view.reason})"
        self._log.write("ended", ending=endings.UNKNOWN, reason=reason, last_step=None, job_id=job_id)
        self._log.write("requeued", method="requeue", job_id=job_id)
        return True
