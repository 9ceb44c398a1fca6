"""The status of a run: its files, combined with one query to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from clustertrain import clock
from clustertrain.errors import ClusterTrainError, CommandFailed
from clustertrain.run import attempts, endings, event_types, events, metrics, state
from clustertrain.run.attempts import Attempt
from clustertrain.run.recipe_hash import load_recipe_hash
from clustertrain.run.run_dir import RunDir, explain_permission_errors
from clustertrain.run.run_spec import load_spec
from clustertrain.run.usage import contract_status
from clustertrain.run.usage.contract_status import ContractStatus
from clustertrain.run.usage.goodput import Goodput, compute_goodput
from clustertrain.scheduler.backend import Backend, JobStart, JobView
from clustertrain.scheduler.registry import get_backend


@dataclass(frozen=True)
class Unreadable:
    """A run whose files cannot be read."""

    run: RunDir
    error: str
    fix: str | None = None


@dataclass
class SchedulerAnswers:
    """The schedulers' answers for many jobs, by job id."""

    views: dict[str, JobView] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Why there is no answer."""
    queried: set[str] = field(default_factory=set)
    """Ids of all jobs queried; a job in neither ``views`` nor ``errors`` is unknown to its scheduler."""
    backends_without_accounting: set[str] = field(default_factory=set)
    """Names of backends whose accounting did not answer."""
    not_asked: str | None = None
    """Set: no scheduler is asked, and this is why there is no answer for the jobs that were not queried."""

    def covers(self, job_id: str) -> bool:
        """Return whether there will be no better answer for this job."""
        return job_id in self.queried or self.not_asked is not None


@dataclass(frozen=True)
class RunStatus:
    """The status of a run."""

    run: RunDir
    backend: str
    name: str
    job_id: str | None
    state: str
    view: JobView | None
    scheduler_error: str | None
    """Why the scheduler did not answer."""
    history: Sequence[Attempt]
    step: int | None
    total_steps: int | None
    goodput: Goodput
    skipped_steps: int = 0
    """Steps skipped because of NaN, Inf or a loss spike."""
    contract: ContractStatus | None = None
    recipe_hash: str = ""
    """Only set by :func:`run_statuses`, for lists of runs."""

    @property
    def roll_backs(self) -> int:
        return sum(a.roll_backs for a in self.history)

    def attempt_state(self, attempt: Attempt) -> str:
        """Return the attempt's ending, ``running`` or ``unknown``."""
        return attempt.ending or (state.RUNNING if self.state == state.RUNNING else endings.UNKNOWN)

    @property
    def is_final(self) -> bool:
        return self.state in state.FINAL

    @property
    def is_cancelling(self) -> bool:
        """Whether the owner cancelled the run and its job has not ended yet."""
        return not self.is_final and self.run.cancel_marker.exists()

    @property
    def shown_state(self) -> str:
        """The state for a person: ``cancelling`` while a cancelled run has not ended."""
        return state.CANCELLING if self.is_cancelling else self.state

    @property
    def undecided_reason(self) -> str | None:
        """How the run ended, if it ended without a decision; otherwise None."""
        last_attempt = self.history[-1] if self.history else None
        if self.state != state.FAILED or (last_attempt is not None and last_attempt.stopped is not None):
            return None
        if self.run.watched.exists():  # nothing in such a job decides
            return None
        if last_attempt is None and self.job_id is None:  # killed between writing the folder and recording the job
            return "its submission was interrupted: no job is recorded"
        suffix = f" (the scheduler reports {self.view.reason})" if self.view is not None and self.view.reason else ""
        if last_attempt is None or last_attempt.requeued is not None:
            n = 1 if last_attempt is None else last_attempt.n + 1
            return f"job {self.job_id} ended before attempt {n} began{suffix}"
        reason = "before its batch process decided on a requeue: it may have been killed"
        return f"attempt {last_attempt.n} ended {reason}{suffix}"

    @property
    def end_reason(self) -> str:
        """Why the run has ended without being completed; empty if it is or may become so, or if nothing is known."""
        if not self.is_final or self.state == state.COMPLETED:
            return ""
        last = self.history[-1] if self.history else None
        decision = self.undecided_reason or (last.stopped if last is not None else None) or ""
        ending = (last.reason if last is not None else None) or ""
        # Some decisions quote the ending of the last attempt.
        return decision if ending in decision else "; ".join(filter(None, (decision, ending)))

    @property
    def is_held(self) -> bool:
        """Whether the job stays in the queue until its owner releases it.

        Slurm holds a job that it could not start ("launch failed requeued held": the node came back from DOWN while the
        last start was still ending there). Only an administrator can release one with JobHeldAdmin.
        """
        reason = self.view.reason.lower() if self.view is not None and self.view.state == "PENDING" else ""
        return ("held" in reason or "jobhold" in reason) and reason != "jobheldadmin"

    @property
    def continue_command(self) -> str | None:
        """The command that continues a run that ended without a decision, or whose job is held."""
        if self.undecided_reason:
            return f"clustertrain requeue {self.run.id}"
        return f"scontrol release {self.job_id}" if self.is_held else None


def backend_for_run(run: RunDir) -> Backend:
    """Return the backend that the run was submitted to."""
    submitted = events.select_last(events.for_run(run), event_types.Submitted)
    backend_name = (submitted.backend if submitted else None) or load_spec(run).job.backend
    return get_backend(backend_name if backend_name in ("local", "slurm") else load_spec(run).job.backend)


def latest_job_id(run: RunDir, history: Sequence[Attempt]) -> str | None:
    ids = attempts.list_job_ids(run, history)
    return ids[-1] if ids else None


def total_steps(run: RunDir) -> int | None:
    """Return the total of the newest session, which a script chooses; before the first step, that of the recipe."""
    for attempt in reversed(run.attempts()):
        event = events.select_last(events.for_attempt(attempt), event_types.FirstStep)
        if event is not None and event.total is not None:
            return event.total
    spec = load_spec(run)
    return None if spec.script is not None else spec.recipe.train.steps


def run_status(run: RunDir, answers: SchedulerAnswers | None = None) -> RunStatus:
    """Return the status of a run. ``answers`` are those of an earlier query for many runs."""
    backend = backend_for_run(run)
    answers = answers or SchedulerAnswers()
    history, job_id = _load_history(run, backend, answers)
    view, scheduler_error = answers.views.get(job_id or ""), answers.errors.get(job_id or "", answers.not_asked)
    starts: list[JobStart] = []
    # A run that was requeued may have been cancelled since in the queue, with scancel.
    if job_id and (view is None or not view.is_alive) and not state.is_settled(history):
        starts = _list_starts(backend, job_id, answers)
    accounting_state = starts[-1].state if starts else ""
    if not accounting_state and not history and view is None and scheduler_error is None and "_" in (job_id or ""):
        # Slurm drops an array task that is cancelled in the queue, also from the accounting (seen on 22.05). A task
        # that started would be in one of them.
        accounting_state = "CANCELLED"
    run_state = state.determine_state(
        run, history, view, accounting_state, job_id if scheduler_error is not None else None
    )
    history = _with_scheduler_ending(history, run_state, starts)
    running = run_state == state.RUNNING
    row = metrics.find_latest_row(run)
    steps = [*(a.last_step for a in history if a.last_step is not None), *run.committed_steps()[-1:]]
    return RunStatus(
        run=run,
        backend=backend.name,
        name=load_spec(run).job.name or run.id,
        job_id=job_id,
        state=run_state,
        view=view,
        scheduler_error=scheduler_error,
        history=history,
        step=int(row["step"]) if row and running else max(steps, default=None),
        total_steps=total_steps(run),
        goodput=compute_goodput(
            run, history, clock.now(), run_state in state.FINAL, is_queued=run_state in (state.PENDING, state.REQUEUED)
        ),
        skipped_steps=skipped if isinstance(skipped := (row or {}).get("sum_skipped"), int) else 0,
        contract=contract_status.load_contract_status(run, history, clock.now() if running else None),
    )


def _load_history(run: RunDir, backend: Backend, answers: SchedulerAnswers) -> tuple[list[Attempt], str | None]:
    """Return the attempts and the id of the newest job, which ``answers`` covers afterwards.

    The attempts are never older than the answer that the job has ended. Otherwise an attempt that recorded its ending
    between the two reads would count as one that ended without a record.
    """
    history = attempts.load_attempts(run)
    while (job_id := latest_job_id(run, history)) is not None and not answers.covers(job_id):
        _query_jobs(backend, [job_id], answers)
        view = answers.views.get(job_id)
        if view is None or not view.is_alive:
            history = attempts.load_attempts(run)  # may name a newer job
    return history, job_id


def _query_jobs(backend: Backend, job_ids: Sequence[str], answers: SchedulerAnswers) -> None:
    answers.queried.update(job_ids)
    # Slurm answers for all jobs or for none; each local job has a file, which may be unreadable.
    for group in [job_ids] if backend.name == "slurm" else [[job_id] for job_id in job_ids]:
        try:
            answers.views.update(backend.query_jobs(group))
        except CommandFailed as e:
            answers.errors.update(dict.fromkeys(group, str(e)))


def _list_starts(backend: Backend, job_id: str, answers: SchedulerAnswers) -> list[JobStart]:
    if backend.name in answers.backends_without_accounting or answers.not_asked is not None:
        return []
    try:
        return backend.list_starts(job_id)
    except ClusterTrainError as e:
        if isinstance(e, CommandFailed):
            answers.backends_without_accounting.add(backend.name)
        return []  # no accounting: the ending stays unknown


def _with_scheduler_ending(history: Sequence[Attempt], run_state: str, starts: Sequence[JobStart]) -> list[Attempt]:
    """Return the attempts, with the last one's ending from the accounting if it has not recorded one.

    Nothing is written; the next start records the ending.
    """
    result = list(history)
    if not result or result[-1].ending is not None or run_state == state.RUNNING:
        return result
    row = starts[-1] if starts else None
    ending = endings.from_scheduler_state(row.state) if row else endings.UNKNOWN
    if run_state in (state.CANCELLED, state.COMPLETED):
        ending = endings.CANCELLED if run_state == state.CANCELLED else endings.COMPLETED
    reason = (
        f"ended without a record; the scheduler reports {row.state}" if row and ending != endings.COMPLETED else None
    )
    result[-1] = msgspec.structs.replace(result[-1], ending=ending, reason=reason, end=row.end if row else None)
    return result


def run_statuses(runs: Sequence[RunDir], answers: SchedulerAnswers | None = None) -> list[RunStatus | Unreadable]:
    """Return the status of many runs, with one query per scheduler and accounting queries only if necessary.

    ``answers`` are those of an earlier query for all of the runs.
    """
    found = query_schedulers(runs) if answers is None else answers
    return [_status_or_unreadable(run, found) for run in runs]


def query_schedulers(runs: Sequence[RunDir]) -> SchedulerAnswers:
    """Ask each scheduler once for the newest jobs of its runs."""
    job_ids_by_backend: dict[str, list[str]] = {}
    backends: dict[str, Backend] = {}
    for run in runs:
        try:
            backend = backend_for_run(run)
            job_id = latest_job_id(run, attempts.load_attempts(run))
        except _READ_ERRORS:
            continue  # the status says why
        backends[backend.name] = backend
        if job_id is not None:
            job_ids_by_backend.setdefault(backend.name, []).append(job_id)
    answers = SchedulerAnswers()
    for name, ids in job_ids_by_backend.items():
        _query_jobs(backends[name], ids, answers)
    return answers


# Damaged files may raise anything, and one such run must not hide the others.
_READ_ERRORS = Exception


def _status_or_unreadable(run: RunDir, answers: SchedulerAnswers) -> RunStatus | Unreadable:
    try:
        with explain_permission_errors():
            return replace(run_status(run, answers), recipe_hash=load_recipe_hash(run))
    except _READ_ERRORS as e:
        if isinstance(e, ClusterTrainError):
            return Unreadable(run, e.message, e.fix)
        return Unreadable(run, f"{type(e).__name__}: {e}")
