"""What is true of a run now: its own files, joined with one question to the scheduler."""

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
    """A run whose own files do not read."""

    run: RunDir
    error: str
    fix: str | None = None


@dataclass
class SchedulerAnswers:
    """What the schedulers said of many jobs, by job id, each of them asked once."""

    views: dict[str, JobView] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # why there is no answer
    backends_without_accounting: set[str] = field(default_factory=set)  # backends


@dataclass(frozen=True)
class RunStatus:
    run: RunDir
    backend: str
    name: str
    job_id: str | None
    state: str
    view: JobView | None
    scheduler_error: str | None  # why the scheduler's part is missing
    history: Sequence[Attempt]
    step: int | None
    total_steps: int | None
    goodput: Goodput
    skipped_steps: int = 0  # because loss or gradient was not finite, or the loss a spike
    contract: ContractStatus | None = None
    recipe_hash: str = ""  # of :func:`run_statuses` alone: whoever shows many runs reads no file of one again

    @property
    def roll_backs(self) -> int:
        return sum(a.roll_backs for a in self.history)

    def attempt_state(self, attempt: Attempt) -> str:
        """An attempt's ending, or ``running``."""
        return attempt.ending or ("running" if self.state == state.RUNNING else endings.UNKNOWN)

    @property
    def is_final(self) -> bool:
        return self.state in state.FINAL

    @property
    def is_cancelling(self) -> bool:
        """Its owner has cancelled it, and its job has not ended yet."""
        return not self.is_final and self.run.cancel_marker.exists()

    @property
    def undecided_reason(self) -> str | None:
        """What happened where the run ended and nobody decided that it should."""
        last_attempt = self.history[-1] if self.history else None
        if self.state != state.FAILED or (last_attempt is not None and last_attempt.stopped is not None):
            return None
        suffix = f" (the scheduler says {self.view.reason})" if self.view is not None and self.view.reason else ""
        if last_attempt is None or last_attempt.requeued is not None:
            n = 1 if last_attempt is None else last_attempt.n + 1
            return f"job {self.job_id} ended before attempt {n} began{suffix}"
        return (
            f"attempt {last_attempt.n} ended without a decision on the run, as when its batch process is killed{suffix}"
        )

    @property
    def is_held(self) -> bool:
        """The job waits in the queue until its owner releases it. Slurm itself holds a job that it could not start
        ("launch failed requeued held": the node came back from DOWN while the last start was still ending there). Only
        an administrator can release a job that an administrator holds (JobHeldAdmin)."""
        reason = self.view.reason.lower() if self.view is not None and self.view.state == "PENDING" else ""
        return ("held" in reason or "jobhold" in reason) and reason != "jobheldadmin"

    @property
    def continue_command(self) -> str | None:
        """The command that continues a run that nobody decided to end, or whose job is held."""
        if self.undecided_reason:
            return f"clustertrain requeue {self.run.id}"
        return f"scontrol release {self.job_id}" if self.is_held else None


def backend_for_run(run: RunDir) -> Backend:
    """The backend that the run was submitted to."""
    submitted = events.select_last(events.for_run(run), event_types.Submitted)
    backend_name = (submitted.backend if submitted else None) or load_spec(run).job.backend
    return get_backend(backend_name if backend_name in ("local", "slurm") else load_spec(run).job.backend)


def latest_job_id(run: RunDir, history: Sequence[Attempt]) -> str | None:
    ids = attempts.list_job_ids(run, history)
    return ids[-1] if ids else None


def total_steps(run: RunDir) -> int | None:
    """From the newest session's own word: a script decides about its steps by itself."""
    for attempt in reversed(run.attempts()):
        event = events.select_last(events.for_attempt(attempt), event_types.FirstStep)
        if event is not None and event.total is not None:
            return event.total
    spec = load_spec(run)
    return None if spec.script is not None else spec.recipe.train.steps


def run_status(run: RunDir, answers: SchedulerAnswers | None = None) -> RunStatus:
    """``answers`` may hold what was asked for many runs at once before."""
    history = attempts.load_attempts(run)
    job_id = latest_job_id(run, history)
    backend = backend_for_run(run)
    if answers is None:
        answers = SchedulerAnswers()
        _query_jobs(backend, [job_id] if job_id is not None else [], answers)
    view, scheduler_error = answers.views.get(job_id or ""), answers.errors.get(job_id or "")
    starts: list[JobStart] = []
    # An attempt that ended and was to go on may have been cancelled since, in the queue, with Slurm's own command.
    if job_id and (view is None or not view.is_alive) and not state.is_settled(history):
        starts = _list_starts(backend, job_id, answers)
    accounting_state = starts[-1].state if starts else ""
    if not accounting_state and not history and view is None and scheduler_error is None and "_" in (job_id or ""):
        # Slurm forgets an array task that is cancelled while it waits, and accounting never hears of it (seen on
        # 22.05). Of one that a node has seen, the queue or accounting would know.
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


def _query_jobs(backend: Backend, job_ids: Sequence[str], answers: SchedulerAnswers) -> None:
    # Slurm answers for all jobs or for none; a local job has a file of its own, which may not read.
    for group in [job_ids] if backend.name == "slurm" else [[job_id] for job_id in job_ids]:
        try:
            answers.views.update(backend.query_jobs(group))
        except CommandFailed as e:
            answers.errors.update(dict.fromkeys(group, str(e)))


def _list_starts(backend: Backend, job_id: str, answers: SchedulerAnswers) -> list[JobStart]:
    if backend.name in answers.backends_without_accounting:
        return []
    try:
        return backend.list_starts(job_id)
    except ClusterTrainError as e:
        if isinstance(e, CommandFailed):
            answers.backends_without_accounting.add(backend.name)
        return []  # no accounting: unknown stays unknown


def _with_scheduler_ending(history: Sequence[Attempt], run_state: str, starts: Sequence[JobStart]) -> list[Attempt]:
    """The last attempt with the accounting's verdict, where it ended without a word of its own. A reader's view:
    nothing is written, the next start writes its own."""
    result = list(history)
    if not result or result[-1].ending is not None or run_state == state.RUNNING:
        return result
    row = starts[-1] if starts else None
    ending = endings.from_scheduler_state(row.state) if row else endings.UNKNOWN
    if run_state == state.CANCELLED:
        ending = endings.CANCELLED
    reason = f"ended without a word of its own; the scheduler says {row.state}" if row else None
    result[-1] = msgspec.structs.replace(result[-1], ending=ending, reason=reason, end=row.end if row else None)
    return result


def run_statuses(runs: Sequence[RunDir]) -> list[RunStatus | Unreadable]:
    """Many runs with one question to each scheduler, and none to accounting but for what is unexplained."""
    job_ids_by_backend: dict[str, list[str]] = {}
    backends: dict[str, Backend] = {}
    for run in runs:
        try:
            backend = backend_for_run(run)
            job_id = latest_job_id(run, attempts.load_attempts(run))
        except _READ_ERRORS:
            continue  # said below
        backends[backend.name] = backend
        if job_id is not None:
            job_ids_by_backend.setdefault(backend.name, []).append(job_id)
    answers = SchedulerAnswers()
    for name, ids in job_ids_by_backend.items():
        _query_jobs(backends[name], ids, answers)
    return [_status_or_unreadable(run, answers) for run in runs]


# What reading a run's files raises when they are not what was written: one such run must not hide the others.
# At the edge of one run: of files of any content nobody knows all that can be wrong.
_READ_ERRORS = Exception


def _status_or_unreadable(run: RunDir, answers: SchedulerAnswers) -> RunStatus | Unreadable:
    try:
        with explain_permission_errors():
            return replace(run_status(run, answers), recipe_hash=load_recipe_hash(run))
    except _READ_ERRORS as e:
        if isinstance(e, ClusterTrainError):
            return Unreadable(run, e.message, e.fix)
        return Unreadable(run, f"{type(e).__name__}: {e}")
