"""The state of a run, as one table over what its own files say and what the scheduler says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clustertrain.run import endings
from clustertrain.run.attempts import Attempt
from clustertrain.run.run_dir import RunDir

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


def settled(history: Sequence[Attempt]) -> bool:
    """The last attempt's own word is final, as far as that attempt's job goes."""
    last = history[-1] if history else None
    return last is not None and (last.ending in (endings.COMPLETED, endings.CANCELLED) or last.stopped is not None)


def of_run(
    run: RunDir,
    history: Sequence[Attempt],
    job: SchedulerSays | None,
    accounted: str = "",
    unanswered: str | None = None,
) -> str:
    """One of pending, running, requeued, completed, failed, cancelled.

    ``accounted`` is the accounting's last word for the newest job, used where the run's own files have none.
    ``unanswered`` is the newest job's id where the scheduler gave no answer, which is not "no such job": then only what
    the run's files or the accounting say is final.
    """
    last = history[-1] if history else None
    if last is not None and last.ending == endings.COMPLETED:
        return COMPLETED
    alive = job is not None and job.alive
    gone = _gone(job, accounted)
    silent = unanswered is not None and gone != CANCELLED
    if run.cancelled.exists() and not alive and not (silent and (last is None or last.ending is None)):
        return CANCELLED
    if last is None:
        return PENDING if alive or silent else gone
    if last.ending is None:
        # Slurm may have put the job back by itself: then it is pending, and this attempt is over.
        if alive and job is not None:
            return REQUEUED if job.state == "PENDING" else RUNNING
        return RUNNING if silent else gone
    if settled(history):
        # Its owner may have continued it since, under another job.
        other = (job.job_id if alive and job is not None else unanswered if silent else None) or last.job_id
        if other != last.job_id:
            return REQUEUED
        return CANCELLED if last.ending == endings.CANCELLED else FAILED
    return REQUEUED if alive or silent else gone


def _gone(job: SchedulerSays | None, accounted: str) -> str:
    word = (job.state if job is not None else "") or accounted
    return CANCELLED if endings.of_scheduler(word) == endings.CANCELLED else FAILED
