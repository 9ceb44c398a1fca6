"""End runs for good: their markers first, then their jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from clustertrain import clock, fsio, settings
from clustertrain.errors import ClusterTrainError, CommandFailed
from clustertrain.run import events, state
from clustertrain.run.attempts import list_job_ids
from clustertrain.run.run_dir import RunDir
from clustertrain.run.watched import refuse_watched
from clustertrain.scheduler.backend import Backend
from clustertrain.scheduler.registry import get_backend
from clustertrain.scheduler.run_status import RunStatus, Unreadable, run_statuses


class Cancellation(NamedTuple):
    """What became of the runs."""

    statuses: Sequence[RunStatus]
    """Before the cancellation."""
    states: dict[RunDir, str]
    """``cancelled``; ``cancelling`` until the job has ended; the state of a run that had ended before."""
    notes: list[str]
    """What the user should know, one line each."""


def cancel_runs(runs: Sequence[RunDir]) -> Cancellation:
    """End pending or running runs for good; their checkpoints stay.

    Raises:
        ClusterTrainError: a run cannot be read, or all have ended already. Nothing is cancelled then.
        UsageError: a run only watches its job.
    """
    for run in runs:
        refuse_watched(run, "cancel", "scancel {job} ends the job itself")
    statuses: list[RunStatus] = []
    for current in run_statuses(runs):
        if isinstance(current, Unreadable):
            raise ClusterTrainError(f"{current.run.id}: {current.error}", fix=current.fix)
        statuses.append(current)
    already_ended = [f"{s.run.id} has already ended: {s.state}" for s in statuses if s.is_final]
    if len(already_ended) == len(statuses):
        raise ClusterTrainError("\n".join(already_ended))
    active = [s for s in statuses if not s.is_final]
    already_cancelling = {s.run for s in active if s.is_cancelling}
    # The markers come first: a process that is deciding about a run now must see it before the job is gone.
    for current in active:
        fsio.write_json(current.run.cancel_marker, {"t": clock.now(), "user": settings.user_name()})
        events.log_user_event(current.run, "cancelled")
    cancelling, notes = _cancel_jobs(active)
    repeated = [
        f"note: {s.run.id} was being cancelled already; `clustertrain wait {s.run.id}` waits for its end"
        for s in active
        if s.run in already_cancelling and s.run in cancelling
    ]
    states = {
        s.run: s.state if s.is_final else state.CANCELLING if s.run in cancelling else state.CANCELLED for s in statuses
    }
    return Cancellation(statuses, states, [*notes, *already_ended, *repeated])


def _cancel_jobs(statuses: Sequence[RunStatus]) -> tuple[set[RunDir], list[str]]:
    """Ask the schedulers to end the jobs of these runs; return the runs whose jobs may still be alive, and notes.

    A scheduler that did not answer a moment ago is not asked again.
    """
    still_running: set[RunDir] = set()
    notes: list[str] = []
    # Slurm answers for all jobs or for none; only its own machine knows about a local job.
    slurm_runs = [current for current in statuses if current.backend == "slurm"]
    groups = [*([slurm_runs] if slurm_runs else []), *([current] for current in statuses if current.backend != "slurm")]
    for group in groups:
        ids_by_run = {current.run: list_job_ids(current.run) for current in group}
        silence = next((current.scheduler_error for current in group if current.scheduler_error), None)
        backend = get_backend(group[0].backend)
        try:
            if silence is not None:
                raise CommandFailed(silence)
            alive = _alive_jobs(backend, [job_id for run_job_ids in ids_by_run.values() for job_id in run_job_ids])
            if alive:
                backend.cancel(*alive)
                alive = _alive_jobs(backend, alive)
            still_running.update(run for run, run_job_ids in ids_by_run.items() if set(run_job_ids) & set(alive))
        except CommandFailed as e:
            still_running.update(ids_by_run)
            run_ids = " ".join(run.id for run in ids_by_run)
            notes += [
                f"note: the scheduler did not answer ({e.message}); the run is marked as cancelled: a running attempt"
                " ends within a minute, a pending job as soon as it starts",
                f"      to remove a pending job from the queue, repeat: clustertrain cancel {run_ids}",
            ]
    return still_running, notes


def _alive_jobs(backend: Backend, job_ids: Sequence[str]) -> list[str]:
    return [job_id for job_id, view in backend.query_jobs(job_ids).items() if view.is_alive]
