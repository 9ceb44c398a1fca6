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


class SchedulerJob(Protocol):
    """The parts of a scheduler's answer that matter here; None in its place means it does not know the job."""

    @property
    def job_id(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def is_alive(self) -> bool: ...


def is_settled(history: Sequence[Attempt]) -> bool:
    """The last attempt's own word is final, as far as that attempt's job goes."""
    last = history[-1] if history else None
    return last is not None and (last.ending in (endings.COMPLETED, endings.CANCELLED) or last.stopped is not None)


def determine_state(
    run: RunDir,
    history: Sequence[Attempt],
    job: SchedulerJob | None,
    accounting_state: str = "",
    unanswered_job_id: str | None = None,
) -> str:
    """One of pending, running, requeued, completed, failed, cancelled.

    ``accounting_state`` is the accounting's last word for the newest job, used where the run's own files have none.
    ``unanswered_job_id`` is the newest job's id where the scheduler gave no answer, which is not "no such job": then
    only what the run's files or the accounting say is final.
    """
    last = history[-1] if history else None
    if last is not None and last.ending == endings.COMPLETED:
        return COMPLETED
    is_alive = job is not None and job.is_alive
    ended_state = _ended_state(job, accounting_state)
    is_silent = unanswered_job_id is not None and ended_state != CANCELLED
    if run.cancel_marker.exists() and not is_alive and not (is_silent and (last is None or last.ending is None)):
        return CANCELLED
    if last is None:
        return PENDING if is_alive or is_silent else ended_state
    if last.ending is None:
        # Slurm may have put the job back by itself: then it is pending, and this attempt is over.
        if is_alive and job is not None:
            return REQUEUED if job.state == "PENDING" else RUNNING
        return RUNNING if is_silent else ended_state
    if is_settled(history):
        # Its owner may have continued it since, under another job.
        current_job_id = (
            job.job_id if is_alive and job is not None else unanswered_job_id if is_silent else None
        ) or last.job_id
        if current_job_id != last.job_id:
            return REQUEUED
        return CANCELLED if last.ending == endings.CANCELLED else FAILED
    return REQUEUED if is_alive or is_silent else ended_state


def _ended_state(job: SchedulerJob | None, accounting_state: str) -> str:
    job_state = (job.state if job is not None else "") or accounting_state
    return CANCELLED if endings.from_scheduler_state(job_state) == endings.CANCELLED else FAILED
