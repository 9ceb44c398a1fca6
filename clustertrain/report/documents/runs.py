"""Documents about runs: ``list``, ``wait``, ``cancel``, ``requeue`` and ``rm``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from clustertrain.report.progress import ActiveAlert, Failure, Progress, load_progress
from clustertrain.run.attempts import Attempt
from clustertrain.run.recipe_hash import load_recipe_hash
from clustertrain.run.run_dir import RunDir
from clustertrain.run.usage.contract_status import ContractStatus
from clustertrain.run.usage.goodput import Goodput
from clustertrain.scheduler.run_status import RunStatus, Unreadable

if TYPE_CHECKING:
    from clustertrain.submit.cancel_runs import Cancellation


class AttemptEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the run."""

    n: int
    """Number of the attempt, from 1."""
    job_id: str
    """The job of the attempt; empty if it is not recorded."""
    restart: int
    """How often the job had been requeued before, as Slurm counts."""
    state: str
    """How the attempt ended; `running`, or `unknown` if nothing recorded it."""
    reason: str | None
    """Why it ended so; null while it runs, or if nothing recorded it."""
    nodes: tuple[str, ...]
    """Names of its nodes."""
    start: float | None
    """When it started; null if that is not recorded."""
    end: float | None
    """When it ended; null while it runs, or if nothing recorded it."""
    first_step: int | None
    """Steps completed after its first step; null before that."""
    last_step: int | None
    """The newest step that is known to be complete; null before the first one."""
    committed_step: int | None
    """Step of the newest checkpoint that it committed; null before the first one."""
    roll_backs: int
    """Returns to an earlier checkpoint because training went wrong."""
    requeued: str | None
    """How the run was continued: `requeue`, `resubmit` or `slurm`; null if it was not."""
    stopped: str | None
    """Why the run is not continued; null if nothing decided against it."""


class RunEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    run: str
    """Id of the run."""
    job_id: str | None
    """The newest job: Slurm's id, or one that starts with `local-`; null if its submission was interrupted."""
    name: str
    """Name of the job; without one, the id of the run."""
    user: str
    """Owner of the run folder."""
    backend: str
    """`slurm` or `local`."""
    state: str
    """`pending`, `running`, `requeued`, `completed`, `failed` or `cancelled`."""
    step: int | None
    """Completed optimizer steps; null before the first one, and for a program that reports none."""
    total_steps: int | None
    """Optimizer steps to complete; null for a script that has not said it."""
    submitted: float | None
    """When it was submitted; null if that is not recorded."""
    nodes: int
    """Number of nodes."""
    gpus_per_node: int
    """GPUs per node; on the CPU, ranks."""
    gpus: int
    """GPUs of all nodes; on the CPU, ranks."""
    loss: float | None
    """Newest loss; null if the run has logged none."""
    step_s: float | None
    """Recent time per step, seconds; null before it has been measured."""
    tokens_per_s: float | None
    """Recent tokens per second of all ranks; null before they have been measured, and for data without tokens."""
    since_step_s: float | None
    """Time since the last logged step, seconds; null unless the run is running and has logged one."""
    eta_s: float | None
    """Time for the remaining steps at the recent rate, with checkpoints and evaluations, seconds; null unless the run
    is running and `total_steps` and `step_s` are known."""
    checkpoint_step: int | None
    """Step of the newest committed checkpoint; null without one, and for those that `job.checkpoints` names."""
    checkpoint_t: float | None
    """When the newest checkpoint was committed; null without one."""
    failure: Failure | None
    """Why the last attempt failed; null if it did not, or if no rank left a reason."""
    alerts: tuple[ActiveAlert, ...]
    """Alerts of a running run that are not cleared, the most severe first."""
    pending_reason: str | None
    """Why the job waits, in the scheduler's words; null unless it is in the queue."""
    start_estimate: float | None
    """When the scheduler expects to start the job; null unless it is in the queue and has an estimate."""
    scheduler_error: str | None
    """Why the scheduler did not answer; null if it did, or did not have to."""
    cancelling: bool
    """The run was cancelled, and its job has not ended yet."""
    undecided_reason: str | None
    """How the run ended, if nothing decided whether it continues; otherwise null."""
    continue_command: str | None
    """The command that continues a run that ended so, or whose job is held; otherwise null."""
    attempts: tuple[AttemptEntry, ...]
    """All starts, oldest first."""
    skipped_steps: int
    """Steps skipped because of NaN, Inf or a loss spike."""
    roll_backs: int
    """Returns to an earlier checkpoint in all attempts."""
    goodput: Goodput
    """Where the time of the run went, over all attempts."""
    contract: ContractStatus | None
    """The contract of the recipe; null if it has no task, target, slices or limits, and nothing has been evaluated."""
    recipe_hash: str
    """Runs of the same recipe have the same hash."""
    run_dir: str
    """The folder with all files of the run."""
    log: str | None
    """Log of rank 0 in the newest attempt that has one; before that, of the job; null before both."""


class UnreadableRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose files cannot be read."""

    run: str
    """Id of the run."""
    error: str
    """Why it cannot be read."""
    fix: str | None
    """What to do; null if there is no advice."""


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """Runs, newest first."""

    runs: tuple[RunEntry, ...]
    """The runs that can be read."""
    unreadable: tuple[UnreadableRun, ...]
    """The runs that cannot be read."""


class EndedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has ended."""

    run: str
    """Id of the run."""
    state: str
    """`completed`, `failed` or `cancelled`."""
    reason: str | None
    """Why it did not complete; null if it did, or if nothing recorded it."""


class EndedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The runs in the order in which they ended."""

    runs: tuple[EndedRun, ...]
    """One entry per run."""


class CancelledRun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run that was to be cancelled."""

    run: str
    """Id of the run."""
    job_id: str | None
    """Its newest job; null if it has none."""
    state: str
    """`cancelled`; `cancelling` until its job has ended; the state of a run that had ended before."""


class CancelledRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The runs that were named."""

    runs: tuple[CancelledRun, ...]
    """One entry per run, in the order of the arguments."""


class RequeuedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that starts again."""

    run: str
    """Id of the run."""
    job_id: str | None
    """The job in which it continues; null if none is recorded."""
    state: str
    """`requeued`."""


class DeletedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run that was to be deleted."""

    run: str
    """Id of the run."""
    bytes: int | None
    """Size of its folder, bytes; null for a run that is kept."""
    deleted: bool
    """The folder was deleted; false with --dry-run and for a run that is kept."""
    reason: str | None = None
    """Why it is kept; null if it is not."""


class DeletedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The runs that were deleted or, with --dry-run, would be, followed by those that are kept."""

    runs: tuple[DeletedRun, ...]
    """One entry per run."""


def build_run_entry(status: RunStatus, progress: Progress) -> RunEntry:
    """Return the entry of a run in ``list``."""
    return RunEntry(**collect_fields(status, progress))


def build_unreadable(row: Unreadable) -> UnreadableRun:
    """Return the entry of a run that cannot be read."""
    return UnreadableRun(run=row.run.id, error=row.error, fix=row.fix)


def build_list(statuses: Sequence[RunStatus | Unreadable], now: float) -> RunList:
    """Return the document of ``list --json`` at ``now`` (UTC epoch s)."""
    readable = [s for s in statuses if not isinstance(s, Unreadable)]
    return RunList(
        runs=tuple(build_run_entry(s, load_progress(s, now)) for s in readable),
        unreadable=tuple(build_unreadable(s) for s in statuses if isinstance(s, Unreadable)),
    )


def collect_fields(status: RunStatus, progress: Progress) -> dict[str, Any]:
    """Return the values of the fields of :class:`RunEntry`."""
    view = status.view
    is_waiting = view is not None and view.state == "PENDING"
    return {
        **msgspec.structs.asdict(progress),
        "run": status.run.id,
        "job_id": status.job_id,
        "name": status.name,
        "user": status.run.find_owner(),
        "backend": status.backend,
        "state": status.state,
        "step": status.step,
        "total_steps": status.total_steps,
        "gpus": progress.nodes * progress.gpus_per_node,
        "pending_reason": (view.reason or None) if view is not None and is_waiting else None,
        "start_estimate": view.start_time if view is not None and is_waiting else None,
        "scheduler_error": status.scheduler_error,
        "cancelling": status.is_cancelling,
        "undecided_reason": status.undecided_reason,
        "continue_command": status.continue_command,
        "attempts": tuple(_build_attempt(status, attempt) for attempt in status.history),
        "skipped_steps": status.skipped_steps,
        "roll_backs": status.roll_backs,
        "goodput": status.goodput,
        "contract": status.contract if _says_something(status.contract) else None,
        "recipe_hash": status.recipe_hash or load_recipe_hash(status.run),
        "run_dir": str(status.run.path),
        "log": _find_log(status.run),
    }


def _build_attempt(status: RunStatus, attempt: Attempt) -> AttemptEntry:
    same = {name: getattr(attempt, name) for name in AttemptEntry.__struct_fields__ if name != "state"}
    return AttemptEntry(state=status.attempt_state(attempt), **same)


def _says_something(contract: ContractStatus | None) -> bool:
    if contract is None:
        return False
    return bool(contract.task or contract.target or contract.slices or contract.remaining or contract.used) or (
        contract.step is not None
    )


def _find_log(run: RunDir) -> str | None:
    with contextlib.suppress(OSError):
        for attempt in reversed(run.attempts()):
            if attempt.rank_log(0).is_file():
                return str(attempt.rank_log(0))
        if run.job_log.is_file():
            return str(run.job_log)
    return None


def build_cancelled(result: Cancellation) -> CancelledRuns:
    """Return the document of ``cancel --json``."""
    rows = (CancelledRun(run=s.run.id, job_id=s.job_id, state=result.states[s.run]) for s in result.statuses)
    return CancelledRuns(runs=tuple(rows))
