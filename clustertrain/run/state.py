"""The state of a run, as one table over what its own files say and what the scheduler says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clustertrain.run import endings
from clustertrain.run.attempts import Attempt
from clustertrain.run.folder import RunDir

PENDING, RUNNING, REQUEUED = "pending", "running", "requeued"
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
FINAL = frozenset({COMPLETED, FAILED, CANCELLED})


class SchedulerSays(Protocol):
    """The parts of a scheduler's answer that matter here; None in its place means it does not know the job."""

    @property
    def job_id(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def alive(self) -> bool: ...


def of_run(run: RunDir, history: Sequence[Attempt], job: SchedulerSays | None, accounted: str = "") -> str:
    """One of pending, running, requeued, completed, failed, cancelled.

    ``accounted`` is the accounting's last word for the newest job, used where the run's own files have none.
    """
    last = history[-1] if history else None
    if last is not None and last.ending == endings.COMPLETED:
        return COMPLETED
    alive = job is not None and job.alive
    if run.cancelled.exists() and not alive:
        return CANCELLED
    if last is None:
        return PENDING if alive else _gone(job, accounted)
    if last.ending is None:
        # Slurm may have put the job back by itself: then it is pending, and this attempt is over.
        if alive and job is not None:
            return REQUEUED if job.state == "PENDING" else RUNNING
        return _gone(job, accounted)
    if last.ending == endings.CANCELLED or last.stopped is not None:
        # Its owner may have continued it since, under another job.
        if alive and job is not None and job.job_id != last.job_id:
            return REQUEUED
        return CANCELLED if last.ending == endings.CANCELLED else FAILED
    return REQUEUED if alive else _gone(job, accounted)


def _gone(job: SchedulerSays | None, accounted: str) -> str:
    word = (job.state if job is not None else "") or accounted
    return CANCELLED if endings.of_scheduler(word) == endings.CANCELLED else FAILED
