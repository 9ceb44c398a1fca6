"""The start of an attempt: close what earlier ones left open, then claim the next number. Never two at once."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from clustertrain import clock, fsio, settings
from clustertrain.agent import deadline as deadlines
from clustertrain.agent.deadline import Deadline
from clustertrain.errors import ClusterTrainError, CommandFailed, NotOwner
from clustertrain.launch.backend import COMPLETING, PENDING, Backend, JobStart, JobView
from clustertrain.run import attempts, endings
from clustertrain.run.attempts import Attempt
from clustertrain.run.events import EventLog
from clustertrain.run.folder import AttemptDir, RunDir
from clustertrain.run.lead import first_lead_s, lead_s

NO_ANSWER_S = 120.0
HALF_CLAIMED_S = 60.0  # for a claimer to write its record after the mkdir
COMPLETING_S = 120.0  # for the job of an open attempt to leave COMPLETING


@dataclass(frozen=True)
class Identity:
    """Which start of which job this process is."""

    job_id: str
    restart: int
    nodes: tuple[str, ...]
    end_time: float | None


@dataclass(frozen=True)
class Claim:
    attempt: AttemptDir
    job_id: str
    nodes: tuple[str, ...]
    deadline: Deadline


def identify(environ: Mapping[str, str], backend: Backend) -> Identity:
    """Raises ClusterTrainError when this is no job of the backend."""
    job_id = backend.own_job_id(environ)
    if job_id is None:
        raise ClusterTrainError("not inside a job", fix="submit the run with `clustertrain submit`")
    view = _patiently(backend, job_id)
    # Slurm leaves SLURM_RESTART_COUNT unset at the first start.
    restart = int(environ.get(settings.SLURM_RESTART_COUNT) or (view.restarts if view else 0))
    end_time = view.end_time if view else None
    return Identity(job_id=job_id, restart=restart, nodes=backend.own_nodes(environ), end_time=end_time)


def _patiently(backend: Backend, job_id: str) -> JobView | None:
    """The scheduler's view of this very job. No answer for two minutes is taken for "no time limit known": the job
    runs, so there is no reason to end it; the end time is asked for again while it does."""
    found: dict[str, JobView] = {}

    def answered() -> bool:
        try:
            found.update(backend.views([job_id]))
        except CommandFailed:
            return False
        return True

    clock.wait_until(answered, NO_ANSWER_S, 5.0)
    return found.get(job_id)


def claim(run: RunDir, me: Identity, backend: Backend) -> Claim:
    """Close the open attempts before this one and claim the next.

    Raises:
        NotOwner: the run was cancelled, is complete, or another job holds it.
    """
    _refuse_ended(run)
    while True:
        open_attempts = [a for a in attempts.read_all(run) if a.ending is None]
        for attempt in open_attempts:
            _close(run, _settled(run, attempt), me, backend)
        numbers = [a.n for a in run.attempts()]
        attempt_dir = run.attempt(max(numbers, default=0) + 1)
        if fsio.claim_folder(attempt_dir.path):
            held = _furnish(run, attempt_dir, me)
            if max(a.n for a in run.attempts()) > attempt_dir.n:
                raise NotOwner(f"attempt {attempt_dir.n} of {run.id} was taken over while it was being made")
            return held
        # Somebody was faster. The next round finds that attempt open, and its job alive.


def _refuse_ended(run: RunDir) -> None:
    if run.cancelled.exists():
        raise NotOwner(f"{run.id} was cancelled")
    history = attempts.read_all(run)
    if history and history[-1].ending == endings.COMPLETED:
        raise NotOwner(f"{run.id} is complete")


def _settled(run: RunDir, attempt: Attempt) -> Attempt:
    """The attempt with its record; a claimer that has just made the folder gets a moment to write it."""
    record = run.attempt(attempt.n).record
    clock.wait_until(lambda: fsio.peek_json(record) is not None, HALF_CLAIMED_S)
    return attempts.read_one(run, run.attempt(attempt.n))


def _close(run: RunDir, attempt: Attempt, me: Identity, backend: Backend) -> None:
    if attempt.job_id and attempt.job_id != me.job_id:
        _wait_for_end(run, attempt, backend)
    elif attempt.job_id and attempt.restart >= me.restart:
        raise NotOwner(f"attempt {attempt.n} of {run.id} belongs to this very start of job {me.job_id}")
    start = _accounted(attempt, backend)
    ending = endings.of_scheduler(start.state) if start else endings.UNKNOWN
    words = f"the scheduler says {start.state}" if start else "the scheduler remembers nothing of it"
    log = EventLog(run.attempt(attempt.n).events_of(f"closed-by-{me.job_id}-{me.restart}"))
    log.write(
        "ended",
        ending=ending,
        reason=f"ended without a word of its own; {words}",
        last_step=attempt.last_step,
        job_id=attempt.job_id,
        at=start.end if start and start.end else None,
        lost_nodes=[],
    )
    log.write("requeued", how="slurm" if attempt.job_id == me.job_id else "resubmit", job_id=me.job_id)
    log.close()


def _wait_for_end(run: RunDir, attempt: Attempt, backend: Backend) -> None:
    """Another job's attempt is open: fine when that job is over or back in the queue, else the run is not ours."""

    def busy() -> str | None:
        try:
            view = backend.views([attempt.job_id]).get(attempt.job_id)
        except CommandFailed:
            return COMPLETING  # no answer: not known to be over
        return view.state if view is not None and view.alive and view.state != PENDING else None

    def over() -> bool:
        state = busy()
        if state is not None and state != COMPLETING:
            raise NotOwner(f"attempt {attempt.n} of {run.id} is held by job {attempt.job_id}, which is {state}")
        return state is None

    if not clock.wait_until(over, COMPLETING_S, 1.0):
        raise NotOwner(f"job {attempt.job_id}, which holds attempt {attempt.n} of {run.id}, does not end")


def _accounted(attempt: Attempt, backend: Backend) -> JobStart | None:
    """The accounting row of that very start: the one that began nearest to it."""
    if not attempt.job_id:
        return None
    try:
        rows = [s for s in backend.starts(attempt.job_id) if s.start is not None]
    except ClusterTrainError:
        return None  # no accounting: unknown stays unknown
    if not rows or attempt.start is None:
        return None
    began = attempt.start
    return min(rows, key=lambda s: abs((s.start or 0.0) - began))


def _furnish(run: RunDir, attempt: AttemptDir, me: Identity) -> Claim:
    # The record first: without it a later start would think that this claim died half way.
    fsio.write_json(
        attempt.record,
        {
            "job_id": me.job_id,
            "restart": me.restart,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "nodes": list(me.nodes),
            "t": clock.now(),
        },
    )
    allocation_s = me.end_time - clock.now() if me.end_time is not None else None
    deadline = Deadline(end_time=me.end_time, lead_s=lead_s(run, allocation_s), signal_lead_s=first_lead_s(run))
    for folder in (attempt.events, attempt.results, attempt.logs, attempt.telemetry):
        fsio.make_folder(folder)
    fsio.write_text(attempt.nonce, secrets.token_hex(16))
    deadlines.write(attempt.deadline, deadline)
    return Claim(attempt=attempt, job_id=me.job_id, nodes=me.nodes, deadline=deadline)
