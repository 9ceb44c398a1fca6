"""The start of an attempt: check that earlier ones are over, claim the next number, close those left open.

To claim an attempt, a complete folder is renamed to the number after the highest one that was checked. The file system
lets only one process have a number; the others check that attempt too and try the next (docs/decisions/0033).
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertrain import clock, fsio, settings
from clustertrain.agent.deadline import Deadline, write_deadline
from clustertrain.errors import ClusterTrainError, CommandFailed, NotOwner
from clustertrain.run import attempts, endings
from clustertrain.run.attempts import Attempt
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.run.stop_lead_time import compute_lead_s, load_planned_lead_s
from clustertrain.scheduler.backend import COMPLETING, PENDING, Backend, JobStart, JobView

SCHEDULER_TIMEOUT_S = 120.0
RECORD_S = 60.0  # for an attempt's record to appear: an NFS client may cache its absence for this long
COMPLETING_S = 120.0  # for the job of an open attempt to leave COMPLETING


@dataclass(frozen=True)
class JobIdentity:
    """The job of this process, and the number of its earlier restarts."""

    job_id: str
    restart: int
    nodes: tuple[str, ...]
    end_time: float | None
    own_script: bool = False
    """The job's batch script is the user's own."""


@dataclass(frozen=True)
class Claim:
    """A claimed attempt."""

    attempt: AttemptDir
    job_id: str
    nodes: tuple[str, ...]
    deadline: Deadline


def identify_job(environ: Mapping[str, str], backend: Backend) -> JobIdentity:
    """Return the job that this process belongs to; raise ClusterTrainError outside a job of the backend."""
    job_id = backend.current_job_id(environ)
    if job_id is None:
        raise ClusterTrainError("not inside a job", fix="submit the run with `clustertrain submit`")
    view = _query_with_retries(backend, job_id)
    # Slurm leaves SLURM_RESTART_COUNT unset at the first start.
    restart = int(environ.get(settings.SLURM_RESTART_COUNT) or (view.restarts if view else 0))
    end_time = view.end_time if view else None
    return JobIdentity(job_id=job_id, restart=restart, nodes=backend.current_nodes(environ), end_time=end_time)


def _query_with_retries(backend: Backend, job_id: str) -> JobView | None:
    """Return the scheduler's view of this job, or None without an answer for two minutes.

    The job then starts without a known time limit; the batch process queries the end time again while it runs.
    """
    jobs: dict[str, JobView] = {}

    def try_query() -> bool:
        try:
            jobs.update(backend.query_jobs([job_id]))
        except CommandFailed:
            return False
        return True

    clock.wait_until(try_query, SCHEDULER_TIMEOUT_S, 5.0)
    return jobs.get(job_id)


def claim_attempt(run: RunDir, identity: JobIdentity, backend: Backend) -> Claim:
    """Claim the next attempt, and close those that were left open before it.

    Raises:
        NotOwner: the run was cancelled, is complete, or another job holds it.
    """
    staging_dir, deadline = _build_attempt_folder(run, identity)
    taken_numbers: list[int] = []
    try:
        while True:
            history = _read_attempts(run, taken_numbers)
            _check_not_ended(run, history)
            open_attempts = [a for a in history if a.ending is None]
            for attempt in open_attempts:
                _check_attempt_over(run, attempt, identity, backend)
            new_attempt = run.attempt(max((a.n for a in history), default=0) + 1)
            if fsio.rename_folder(staging_dir, new_attempt.path):
                break
            taken_numbers.append(new_attempt.n)
    except BaseException:
        shutil.rmtree(staging_dir, ignore_errors=True)
        raise
    # Only after the claim: the event names the job that continues the run.
    for attempt in open_attempts:
        _close_attempt(run, attempt, identity, backend)
    return Claim(attempt=new_attempt, job_id=identity.job_id, nodes=identity.nodes, deadline=deadline)


def _read_attempts(run: RunDir, taken_numbers: Sequence[int]) -> list[Attempt]:
    """Return all attempts, oldest first, including taken ones that an NFS client may not list yet."""
    listed = attempts.load_attempts(run)
    unlisted = set(taken_numbers) - {a.n for a in listed}
    history = sorted([*listed, *(attempts.load_attempt(run, run.attempt(n)) for n in unlisted)], key=lambda a: a.n)
    return [a if a.job_id or a.ending is not None else _wait_for_record(run, a.n, taken_numbers) for a in history]


def _wait_for_record(run: RunDir, n: int, taken_numbers: Sequence[int]) -> Attempt:
    """Load an attempt once its record is readable; after a minute without one, it is damaged and does not hold the run.

    Raises:
        NotOwner: the attempt was claimed just now, and its record, which names the owner, cannot be read.
    """
    record = run.attempt(n).record
    if not clock.wait_until(lambda: fsio.poll_json(record) is not None, RECORD_S) and n in taken_numbers:
        raise NotOwner(f"attempt {n} of {run.id} was claimed just now, and its record cannot be read: {record}")
    return attempts.load_attempt(run, run.attempt(n))


def _check_not_ended(run: RunDir, history: Sequence[Attempt]) -> None:
    if run.cancel_marker.exists():
        raise NotOwner(f"{run.id} was cancelled")
    if history and history[-1].ending == endings.COMPLETED:
        raise NotOwner(f"{run.id} is complete")


def _check_attempt_over(run: RunDir, attempt: Attempt, identity: JobIdentity, backend: Backend) -> None:
    if attempt.job_id and attempt.job_id != identity.job_id:
        _wait_for_end(run, attempt, backend)
    elif attempt.job_id and attempt.restart >= identity.restart:
        raise NotOwner(f"attempt {attempt.n} of {run.id} belongs to this start of job {identity.job_id}")


def _close_attempt(run: RunDir, attempt: Attempt, identity: JobIdentity, backend: Backend) -> None:
    start = _find_job_start(attempt, backend)
    ending = endings.from_scheduler_state(start.state) if start else endings.UNKNOWN
    explanation = f"the scheduler reports {start.state}" if start else "the scheduler has no record of it"
    log = EventLog(run.attempt(attempt.n).events_path(f"closed-by-{identity.job_id}-{identity.restart}"))
    log.write(
        "ended",
        ending=ending,
        reason=f"ended without a record; {explanation}",
        last_step=attempt.last_step,
        job_id=attempt.job_id,
        ended_at=start.end if start and start.end else None,
        lost_nodes=[],
    )
    log.write("requeued", method="slurm" if attempt.job_id == identity.job_id else "resubmit", job_id=identity.job_id)
    log.close()


def _wait_for_end(run: RunDir, attempt: Attempt, backend: Backend) -> None:
    """Wait until the job of another open attempt is over or back in the queue.

    Raises:
        NotOwner: that job still runs.
    """

    def busy_state() -> str | None:
        try:
            view = backend.query_jobs([attempt.job_id]).get(attempt.job_id)
        except CommandFailed:
            return COMPLETING  # no answer: it may still run
        return view.state if view is not None and view.is_alive and view.state != PENDING else None

    def is_over() -> bool:
        state = busy_state()
        if state is not None and state != COMPLETING:
            raise NotOwner(f"attempt {attempt.n} of {run.id} is held by job {attempt.job_id}, which is {state}")
        return state is None

    if not clock.wait_until(is_over, COMPLETING_S, 1.0):
        raise NotOwner(f"job {attempt.job_id}, which holds attempt {attempt.n} of {run.id}, does not end")


def _find_job_start(attempt: Attempt, backend: Backend) -> JobStart | None:
    """Return the accounting's row for this attempt: the start nearest in time."""
    if not attempt.job_id:
        return None
    try:
        rows = [s for s in backend.list_starts(attempt.job_id) if s.start is not None]
    except ClusterTrainError:
        return None  # no accounting: the ending stays unknown
    if not rows or attempt.start is None:
        return None
    started_at = attempt.start
    return min(rows, key=lambda s: abs((s.start or 0.0) - started_at))


def _build_attempt_folder(run: RunDir, identity: JobIdentity) -> tuple[Path, Deadline]:
    """Create the complete folder of an attempt under a temporary name."""
    staging_dir = run.attempts_folder / f".claim-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    fsio.claim_folder(staging_dir)
    attempt = AttemptDir(staging_dir, 0)
    record = {
        "job_id": identity.job_id,
        "restart": identity.restart,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "nodes": list(identity.nodes),
        "t": clock.now(),
    }
    fsio.write_json(attempt.record, record)
    allocation_s = identity.end_time - clock.now() if identity.end_time is not None else None
    deadline = Deadline(
        end_time=identity.end_time,
        lead_s=compute_lead_s(run, allocation_s),
        signal_lead_s=load_planned_lead_s(run),
        own_script=identity.own_script,
    )
    for folder in (attempt.events, attempt.results, attempt.logs, attempt.telemetry):
        fsio.claim_folder(folder)
    fsio.write_text(attempt.nonce, secrets.token_hex(16))
    write_deadline(attempt.deadline, deadline)
    return staging_dir, deadline
