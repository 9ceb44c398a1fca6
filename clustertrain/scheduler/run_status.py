"""What is true of a run now: its own files, joined with one question to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from clustertrain import clock
from clustertrain.errors import ClusterTrainError, CommandFailed
from clustertrain.run import attempts, contract_status, endings, events, metrics, state
from clustertrain.run.attempts import Attempt
from clustertrain.run.contract_status import Standing
from clustertrain.run.goodput import Goodput, ledger
from clustertrain.run.recipe_hash import recipe_hash
from clustertrain.run.run_dir import RunDir, readable
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.backend import Backend, JobStart, JobView
from clustertrain.scheduler.registry import of_run


@dataclass(frozen=True)
class Unreadable:
    """A run whose own files do not read."""

    run: RunDir
    error: str
    fix: str | None = None


@dataclass
class Answers:
    """What the schedulers said of many jobs, by job id, each of them asked once."""

    views: dict[str, JobView] = field(default_factory=dict)
    silence: dict[str, str] = field(default_factory=dict)  # why there is no answer
    no_accounting: set[str] = field(default_factory=set)  # backends


@dataclass(frozen=True)
class Look:
    run: RunDir
    backend: str
    name: str
    job_id: str | None
    state: str
    view: JobView | None
    silence: str | None  # why the scheduler's part is missing
    history: Sequence[Attempt]
    step: int | None
    total_steps: int | None
    goodput: Goodput
    skipped_steps: int = 0  # because loss or gradient was not finite, or the loss a spike
    contract: Standing | None = None
    recipe_hash: str = ""  # of :func:`look_all` alone: whoever shows many runs reads no file of one again

    @property
    def roll_backs(self) -> int:
        return sum(a.roll_backs for a in self.history)

    def state_of(self, attempt: Attempt) -> str:
        """An attempt's ending, or ``running``."""
        return attempt.ending or ("running" if self.state == state.RUNNING else endings.UNKNOWN)

    @property
    def final(self) -> bool:
        return self.state in state.FINAL

    @property
    def cancelling(self) -> bool:
        """Its owner has cancelled it, and its job has not ended yet."""
        return not self.final and self.run.cancelled.exists()

    @property
    def undecided(self) -> str | None:
        """What happened where the run ended and nobody decided that it should."""
        last = self.history[-1] if self.history else None
        if self.state != state.FAILED or (last is not None and last.stopped is not None):
            return None
        told = f" (the scheduler says {self.view.reason})" if self.view is not None and self.view.reason else ""
        if last is None or last.requeued is not None:
            n = 1 if last is None else last.n + 1
            return f"job {self.job_id} ended before attempt {n} began{told}"
        return f"attempt {last.n} ended without a decision on the run, as when its batch process is killed{told}"

    @property
    def held(self) -> bool:
        """The job waits in the queue until its owner releases it. Slurm itself holds a job that it could not start
        ("launch failed requeued held": the node came back from DOWN while the last start was still ending there). Only
        an administrator can release a job that an administrator holds (JobHeldAdmin)."""
        reason = self.view.reason.lower() if self.view is not None and self.view.state == "PENDING" else ""
        return ("held" in reason or "jobhold" in reason) and reason != "jobheldadmin"

    @property
    def to_continue(self) -> str | None:
        """The command that continues a run that nobody decided to end, or whose job is held."""
        if self.undecided:
            return f"clustertrain requeue {self.run.id}"
        return f"scontrol release {self.job_id}" if self.held else None


def backend_of(run: RunDir) -> Backend:
    """The backend that the run was submitted to."""
    submitted = events.last(events.of_run(run), "submitted")
    named = (submitted or {}).get("backend") or load_spec(run).job.backend
    return of_run(named if named in ("local", "slurm") else load_spec(run).job.backend)


def job_of(run: RunDir, history: Sequence[Attempt]) -> str | None:
    ids = attempts.job_ids(run, history)
    return ids[-1] if ids else None


def total_steps(run: RunDir) -> int | None:
    """From the newest session's own word: a script decides about its steps by itself."""
    for attempt in reversed(run.attempts()):
        event = events.last(events.of_attempt(attempt), "first_step") or {}
        if event.get("total") is not None:
            return int(event["total"])
    spec = load_spec(run)
    return None if spec.script is not None else spec.recipe.train.steps


def look(run: RunDir, answers: Answers | None = None) -> Look:
    """``answers`` may hold what was asked for many runs at once before."""
    history = attempts.read_all(run)
    job_id = job_of(run, history)
    backend = backend_of(run)
    if answers is None:
        answers = Answers()
        _ask(backend, [job_id] if job_id is not None else [], answers)
    view, silence = answers.views.get(job_id or ""), answers.silence.get(job_id or "")
    starts: list[JobStart] = []
    # An attempt that ended and was to go on may have been cancelled since, in the queue, with Slurm's own command.
    if job_id and (view is None or not view.alive) and not state.settled(history):
        starts = _starts(backend, job_id, answers)
    word = starts[-1].state if starts else ""
    if not word and not history and view is None and silence is None and "_" in (job_id or ""):
        # Slurm forgets an array task that is cancelled while it waits, and accounting never hears of it (seen on
        # 22.05). Of one that a node has seen, the queue or accounting would know.
        word = "CANCELLED"
    now_state = state.of_run(run, history, view, word, job_id if silence is not None else None)
    history = _explained(history, now_state, starts)
    running = now_state == state.RUNNING
    row = metrics.latest(run)
    steps = [*(a.last_step for a in history if a.last_step is not None), *run.committed_steps()[-1:]]
    return Look(
        run=run,
        backend=backend.name,
        name=load_spec(run).job.name or run.id,
        job_id=job_id,
        state=now_state,
        view=view,
        silence=silence,
        history=history,
        step=int(row["step"]) if row and running else max(steps, default=None),
        total_steps=total_steps(run),
        goodput=ledger(
            run, history, clock.now(), now_state in state.FINAL, waiting=now_state in (state.PENDING, state.REQUEUED)
        ),
        skipped_steps=skipped if isinstance(skipped := (row or {}).get("sum_skipped"), int) else 0,
        contract=contract_status.standing(run, history, clock.now() if running else None),
    )


def _ask(backend: Backend, job_ids: Sequence[str], answers: Answers) -> None:
    # Slurm answers for all jobs or for none; a local job has a file of its own, which may not read.
    for group in [job_ids] if backend.name == "slurm" else [[job_id] for job_id in job_ids]:
        try:
            answers.views.update(backend.views(group))
        except CommandFailed as e:
            answers.silence.update(dict.fromkeys(group, str(e)))


def _starts(backend: Backend, job_id: str, answers: Answers) -> list[JobStart]:
    if backend.name in answers.no_accounting:
        return []
    try:
        return backend.starts(job_id)
    except ClusterTrainError as e:
        if isinstance(e, CommandFailed):
            answers.no_accounting.add(backend.name)
        return []  # no accounting: unknown stays unknown


def _explained(history: Sequence[Attempt], now_state: str, starts: Sequence[JobStart]) -> list[Attempt]:
    """The last attempt with the accounting's verdict, where it ended without a word of its own. A reader's view:
    nothing is written, the next start writes its own."""
    out = list(history)
    if not out or out[-1].ending is not None or now_state == state.RUNNING:
        return out
    row = starts[-1] if starts else None
    ending = endings.of_scheduler(row.state) if row else endings.UNKNOWN
    if now_state == state.CANCELLED:
        ending = endings.CANCELLED
    reason = f"ended without a word of its own; the scheduler says {row.state}" if row else None
    out[-1] = msgspec.structs.replace(out[-1], ending=ending, reason=reason, end=row.end if row else None)
    return out


def look_all(runs: Sequence[RunDir]) -> list[Look | Unreadable]:
    """Many runs with one question to each scheduler, and none to accounting but for what is unexplained."""
    by_backend: dict[str, list[str]] = {}
    backends: dict[str, Backend] = {}
    for run in runs:
        try:
            backend = backend_of(run)
            job_id = job_of(run, attempts.read_all(run))
        except _DAMAGE:
            continue  # said below
        backends[backend.name] = backend
        if job_id is not None:
            by_backend.setdefault(backend.name, []).append(job_id)
    answers = Answers()
    for name, ids in by_backend.items():
        _ask(backends[name], ids, answers)
    return [_look_or_say(run, answers) for run in runs]


# What reading a run's files raises when they are not what was written: one such run must not hide the others.
# At the edge of one run: of files of any content nobody knows all that can be wrong.
_DAMAGE = Exception


def _look_or_say(run: RunDir, answers: Answers) -> Look | Unreadable:
    try:
        with readable():
            return replace(look(run, answers), recipe_hash=recipe_hash(run))
    except _DAMAGE as e:
        if isinstance(e, ClusterTrainError):
            return Unreadable(run, e.message, e.fix)
        return Unreadable(run, f"{type(e).__name__}: {e}")
