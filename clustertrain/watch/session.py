"""A watched job over its whole life: the step on its nodes, its requeues, and its end.

Several commands may watch a job. The one that holds the lock of the run folder keeps the step; when it leaves, another
one takes over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from clustertrain import clock
from clustertrain.errors import ClusterTrainError, SchedulerError
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.scheduler.slurm_job import SlurmJob, order_nodes, query_details, query_job
from clustertrain.watch import run_folder, target
from clustertrain.watch.node_request import BEAT_S, NodeRequest
from clustertrain.watch.step import WatchStep, step_environ

POLL_S = 5.0  # of the job's state
RESTART_S = 2.0  # before a step that ended is started again, doubled each time
MAX_RESTART_S = 60.0
_TICK_S = 0.5
READY_S = 60.0  # for Python to start on all nodes, which takes long on a busy network file system
OTHERS_S = 10.0  # for the other nodes after the first one
SAMPLES_S = 10.0  # between a node's report that it samples and its first samples in a file


@dataclass(frozen=True)
class WatchOptions:
    """What the user asked for."""

    interval_s: float = 3.0
    note: Callable[[str], object] = print
    """Receives a line for the user."""


class WatchSession:
    """The telemetry of one job, from :meth:`open` to :meth:`close`.

    Attributes:
        ended: set when the job has ended.
    """

    def __init__(self, job: SlurmJob, options: WatchOptions) -> None:
        self._job = job
        self._options = options
        self._run: RunDir | None = None
        self._is_new = False
        self.ended = threading.Event()
        self._lock_fd: int | None = None
        self._step: WatchStep | None = None
        self._attempt: AttemptDir | None = None
        self._old_segments: dict[str, set[str]] = {}  # by node, those of earlier steps
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="watch", daemon=True)

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._job.nodes

    @property
    def run(self) -> RunDir:
        """The run folder, from :meth:`open` on."""
        if self._run is None:
            raise RuntimeError("call open() first")
        return self._run

    def open(self) -> None:
        """Start the samplers and wait until all nodes have reported, or one has failed.

        Raises:
            SchedulerError: Slurm refuses the step; the message has its words.
            ClusterTrainError: no node can be sampled.
        """
        try:
            self._run = target.find_watched_run(self._job)
            if self._run is None:
                self._is_new = True
                self._run = run_folder.create(self._job, query_details(self._job.number))
            if self._acquire():
                self._start_step()
                self._wait_ready()
        except BaseException:
            self._discard()
            raise
        self._thread.start()

    def _discard(self) -> None:
        if self._step is not None:
            self._step.close()
        self._release()
        if self._is_new and self._run is not None:
            run_folder.remove(self._run)

    def _acquire(self) -> bool:
        """Return whether this process is the one that keeps the step."""
        if self._lock_fd is None:
            fd = os.open(self.run.watch_lock, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return False
            except OSError:  # a file system without locks: two commands would sample twice, which reports tolerate
                pass
            self._lock_fd = fd
        return True

    def _release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _start_step(self) -> None:
        job = self._job
        run_folder.close_attempts(self.run, job)
        self._attempt = run_folder.claim_attempt(self.run, job)
        details = query_details(job.number)
        if not details.groups:
            raise SchedulerError(
                f"Slurm names no nodes of job {job.job_id}", fix="see whether it has ended: squeue --me"
            )
        nodes = order_nodes(details.groups)
        request = NodeRequest(
            run=str(self.run.path.resolve()),
            attempt=self._attempt.n,
            job_id=job.job_id,
            number=job.number,
            comparing_node=nodes[0] if len(nodes) > 1 else None,
            interval_s=self._options.interval_s,
        )
        self._old_segments = {node: _list_segments(self._attempt, node) for node in nodes}
        self._step = WatchStep(request, details.groups, step_environ(dict(os.environ)))

    def _wait_ready(self) -> None:
        step = self._step
        assert step is not None
        nodes = set(self._job.nodes)
        clock.wait_until(lambda: bool(step.ready) or nodes <= step.answered or not step.is_alive, READY_S, 0.02)
        clock.wait_until(lambda: nodes <= step.answered or not step.is_alive, OTHERS_S if step.ready else 0.0, 0.02)
        if step.ready:
            for node in sorted(nodes - step.answered):
                self._options.note(f"{node} has not answered yet")
            for node, error in sorted(step.node_errors().items()):
                self._options.note(f"{node} is not sampled: {error}")
            return
        errors = step.node_errors()
        if step.has_started and errors:
            node, error = min(errors.items())
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise ClusterTrainError(
                f"no node of job {self._job.job_id} can be sampled: {node}{more}: {error}",
                fix="install clustertrain, and set $CLUSTERTRAIN_HOME, on a file system that all nodes mount",
            )
        raise _refusal(self._job, step.describe_failure())

    def wait_for_samples(self) -> None:
        """Wait until each node that is sampled has samples in its files."""
        attempt = self._newest_attempt()
        if attempt is None:
            return
        sampled = self._step.ready if self._step is not None else set(self._job.nodes)

        def has_all() -> bool:
            return all(_list_segments(attempt, node) - self._old_segments.get(node, set()) for node in sampled)

        clock.wait_until(lambda: has_all() or self.ended.is_set(), SAMPLES_S, 0.05)

    def _newest_attempt(self) -> AttemptDir | None:
        return self._attempt or next(iter(reversed(self.run.attempts())), None)

    def _keep(self) -> None:
        """Keep the step and follow the job until it ends or this command leaves."""
        next_beat = next_poll = next_look = next_restart = 0.0
        restart_s = RESTART_S
        while not self._stop.wait(_TICK_S):
            now = clock.monotonic()
            step = self._step
            if step is not None and now >= next_beat:
                step.beat()
                next_beat = now + BEAT_S
            is_down = step is None or not step.is_alive
            if now < next_poll and not (step is not None and is_down and now >= next_look):
                continue
            next_poll = now + POLL_S
            if is_down:
                next_look = now + 1.0
            with contextlib.suppress(ClusterTrainError, OSError):  # Slurm or the disk does not answer: try again
                if not self._follow_job():
                    self.ended.set()
                    return
                if is_down and now >= next_restart and self._job.is_running and self._acquire():
                    next_restart, restart_s = now + restart_s, min(2 * restart_s, MAX_RESTART_S)
                    self._replace_step()
                elif not is_down:
                    restart_s = RESTART_S

    def _follow_job(self) -> bool:
        """Read the state of the job, and close attempts that are over. Return whether the job may run again."""
        jobs = query_job(self._job.job_id)
        current = next((job for job in jobs if job.number == self._job.number), None)
        if current is None or not (current.is_pending or current.is_running or current.state == "COMPLETING"):
            if self._acquire():
                run_folder.close_attempts(self.run, None)
            return False
        if current.is_pending and self._acquire():
            run_folder.close_attempts(self.run, current)
        self._job = current
        return True

    def _replace_step(self) -> None:
        if self._step is not None:
            self._step.close()
        self._start_step()

    def close(self) -> None:
        """Leave: end the samplers, and leave the job as it is."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)
        if self._step is not None:
            self._step.close()
        self._release()


def _list_segments(attempt: AttemptDir, node: str) -> set[str]:
    """Return the segments of a node that have samples."""
    from clustertrain.telemetry.store import jsonl_blocks

    return {path.parent.name for path in (attempt.telemetry / node).glob(f"*/{jsonl_blocks.NAME}")}


def _refusal(job: SlurmJob, words: str) -> ClusterTrainError:
    """Return the error for a step that Slurm did not start, with Slurm's own words."""
    if "unrecognized option" in words or "invalid option" in words:
        return SchedulerError(
            f"srun here is too old for `watch`: {words}", fix="it needs Slurm 20.11 or later, which has srun --overlap"
        )
    if job.uid != os.geteuid():
        return SchedulerError(
            f"Slurm refused a step in job {job.job_id} of {job.user}: {words or 'no reason given'}",
            fix=f"only {job.user} can watch it; `squeue --me` lists your jobs",
        )
    return SchedulerError(
        f"Slurm refused a step in job {job.job_id}: {words or 'srun printed nothing'}",
        fix=f"try it by hand: srun --jobid={job.number} --overlap hostname",
    )
