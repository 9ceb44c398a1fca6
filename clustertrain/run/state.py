"""The state of a run, derived from its files and from the scheduler's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from clustertrain.run import endings

if TYPE_CHECKING:
    from clustertrain.run.attempts import Attempt
    from clustertrain.run.run_dir import RunDir

PENDING, RUNNING, REQUEUED = "pending", "running", "requeued"
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
FINAL = frozenset({COMPLETED, FAILED, CANCELLED})
# Shown in place of a state that is not final, until the job of a cancelled run has ended.
CANCELLING = "cancelling"
DESCRIPTIONS = {
    PENDING: "The first job waits in the queue",
    RUNNING: "An attempt runs",
    REQUEUED: "Between two attempts: the job waits in the queue again",
    CANCELLING: "Its owner cancelled the run, and the job has not ended yet",
    COMPLETED: "The last attempt completed",
    FAILED: "The run ended otherwise and does not start again by itself; the ending of the last attempt says why",
    CANCELLED: "Its owner cancelled the run",
}


class SchedulerJob(Protocol):
    """The part of a scheduler's answer that is needed here; None stands for a job that the scheduler does not know."""

    @property
    def job_id(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def is_alive(self) -> bool: ...


def is_settled(history: Sequence[Attempt]) -> bool:
    """Return whether the last attempt recorded a final ending, which only another job can change."""
    last = history[-1] if history else None
    return last is not None and (last.ending in (endings.COMPLETED, endings.CANCELLED) or last.stopped is not None)


def determine_state(
    run: RunDir,
    history: Sequence[Attempt],
    job: SchedulerJob | None,
    accounting_state: str = "",
    unanswered_job_id: str | None = None,
) -> str:
    """Return one of pending, running, requeued, completed, failed, cancelled.

    Args:
        job: the newest job; None if the scheduler does not know it.
        accounting_state: the last state of the newest job in the accounting, used if the run's files record no ending.
        unanswered_job_id: id of the newest job if the scheduler did not answer, which does not mean "no such job":
            then only the run's files and the accounting are final.
    """
    last = history[-1] if history else None
    if last is not None and last.ending == endings.COMPLETED:
        return COMPLETED
    is_alive = job is not None and job.is_alive
    ended_state = _ended_state(run, job, accounting_state)
    is_silent = unanswered_job_id is not None and ended_state != CANCELLED
    if run.cancel_marker.exists() and not is_alive and not (is_silent and (last is None or last.ending is None)):
        return CANCELLED
    if last is None:
        return PENDING if is_alive or is_silent else ended_state
    if last.ending is None:
        # Slurm may have requeued the job without a request: then it is pending, and this attempt has ended.
        if is_alive and job is not None:
            return REQUEUED if job.state == "PENDING" else RUNNING
        return RUNNING if is_silent else ended_state
    if is_settled(history):
        # The owner may have continued the run since, as another job or by a requeue of this one.
        current_job_id = (
            job.job_id if is_alive and job is not None else unanswered_job_id if is_silent else None
        ) or last.job_id
        is_pending = job is not None and job.state == "PENDING" and last.ending != endings.CANCELLED
        if current_job_id != last.job_id or is_pending:
            return REQUEUED
        return CANCELLED if last.ending == endings.CANCELLED else FAILED
    return REQUEUED if is_alive or is_silent else ended_state


def _ended_state(run: RunDir, job: SchedulerJob | None, accounting_state: str) -> str:
    job_state = (job.state if job is not None else "") or accounting_state
    if run.watched.exists() and job_state == "COMPLETED":  # nothing in such a job records its end
        return COMPLETED
    return CANCELLED if endings.from_scheduler_state(job_state) == endings.CANCELLED else FAILED
