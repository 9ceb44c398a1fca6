"""Start a run again: ask its running attempt to stop at a checkpoint, or continue a run that has ended."""

from __future__ import annotations

from collections.abc import Mapping

from clustertrain import clock, fsio
from clustertrain.checkpoint.load.rollback import read_records
from clustertrain.config.parsing.time_limits import parse_time_limit_s
from clustertrain.errors import CheckpointError, ClusterTrainError, UsageError
from clustertrain.run import attempts, endings, events, state
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.run.usage import budget
from clustertrain.run.watched import refuse_watched
from clustertrain.scheduler.requeue_policy import find_exhausted_budget
from clustertrain.scheduler.run_status import backend_for_run, run_status
from clustertrain.submit import continue_run


def requeue_run(run: RunDir, overrides: Mapping[str, str]) -> str | None:
    """Start ``run`` again with the sbatch options ``overrides``, by their names without dashes; return the job's id.

    Raises:
        ClusterTrainError: the run has completed, is pending or being cancelled, or would stop at once.
        CheckpointError: its record of rollbacks cannot be read.
        UsageError: an option has no effect on this run, or is malformed; or the run only watches its job.
    """
    refuse_watched(run, "requeue", "scontrol requeue {job} starts the job itself again")
    continuation = continue_run.Continuation(run)
    current = run_status(run)
    if overrides.keys() - {"time"} and current.backend == "local":
        raise UsageError(
            f"--{next(iter(overrides.keys() - {'time'}))} has no effect on the local backend", fix="leave it out"
        )
    if "time" in overrides:
        parse_time_limit_s(overrides["time"])
    if current.state == state.COMPLETED:
        raise ClusterTrainError(f"{run.id} has completed; there is nothing to continue")
    _check_budget(run)
    _check_rollback_record(run)
    job_id = current.job_id
    is_wrapped = load_spec(run).wrapped
    if is_wrapped:
        _check_wrapped_requeue(run, str(job_id), overrides)
    if run.cancel_marker.exists() and not current.is_final:
        raise ClusterTrainError(
            f"{run.id} is still being cancelled: job {job_id} has not ended", fix=continue_run.suggest_after_cancel(run)
        )
    if current.state == state.RUNNING and current.history[-1].job_id == job_id:
        _check_requeue_limit(run)
        continue_run.request_requeue(run, run.attempt(current.history[-1].n), overrides)
        return job_id
    if not current.is_final:
        raise ClusterTrainError(f"{run.id} is already pending, as job {current.job_id}")
    with fsio.group_umask(run.path):
        continuation.claim()
        events.log_user_event(run, "continued")
        backend = backend_for_run(run)
        if is_wrapped:
            job_id = continuation.requeue_job(backend, str(job_id))
        else:
            job_id = continuation.submit(backend, {**attempts.load_submit_options(run), **overrides})
        events.log_user_event(run, "continued", job_id=job_id, options=dict(overrides))
        continuation.record_job(job_id)
    return job_id


def _check_budget(run: RunDir) -> None:
    """Raise ClusterTrainError if the run's budget is spent, so that it would stop at once."""
    contract = load_spec(run).recipe.contract
    if not contract.has_budget or contract.on_budget_spent != "stop":
        return
    reason = budget.format_spent(contract, budget.compute_run_usage(run, contract, clock.now()))
    if reason:
        raise ClusterTrainError(f"{run.id}: {reason}", fix=f"raise the limits under [recipe.contract] in {run.spec}")


def _check_rollback_record(run: RunDir) -> None:
    """Raise CheckpointError if the record of rollbacks cannot be read: no attempt could resume."""
    try:
        read_records(run.checkpoints)
    except CheckpointError as e:
        raise CheckpointError(f"{run.id} cannot resume: {e.message}", fix=e.fix) from e


def _check_requeue_limit(run: RunDir) -> None:
    """Raise ClusterTrainError if a running run would stop for good instead of being requeued."""
    reason = find_exhausted_budget(
        endings.PREEMPTED, attempts.load_budgeted_attempts(run), load_spec(run).job.max_requeues
    )
    if reason:
        raise ClusterTrainError(
            f"{run.id} would not start again: {reason}",
            fix=f"clustertrain cancel {run.id}; clustertrain wait {run.id}; clustertrain requeue {run.id}  (the count "
            "starts over)",
        )


def _check_wrapped_requeue(run: RunDir, job_id: str, overrides: Mapping[str, str]) -> None:
    """Refuse what a run of `clustertrain wrap` cannot do: only `scontrol requeue` starts the user's script again."""
    if overrides:
        raise UsageError(
            f"--{next(iter(overrides))}: {run.id} runs in your own batch script, whose job keeps its options",
            fix="leave it out, or change the script and submit it again with sbatch",
        )
    problem = backend_for_run(run).find_requeue_problem(job_id)
    if problem:
        raise ClusterTrainError(
            f"{run.id} cannot be requeued: {problem}", fix=f"allow it: scontrol update JobId={job_id} Requeue=1"
        )
