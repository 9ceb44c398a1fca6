"""The run folder of a watched job. It holds what the samplers record, and nothing that would start the job again.

``watched.json`` marks the folder and names the job. Its writer is the ``watch`` command that created the folder; the
attempts are written by the command that holds the lock (:mod:`.session`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from clustertrain import clock, fsio
from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.errors import ClusterTrainError
from clustertrain.run import attempts, endings, json_files, run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.recipe_hash import hash_run_spec
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.scheduler.backend import JobStart
from clustertrain.scheduler.slurm import SlurmBackend
from clustertrain.scheduler.slurm_job import JobDetails, SlurmJob
from clustertrain.submit import provenance

_START_TOLERANCE_S = 60.0  # between Slurm's queue and its accounting


class WatchedJob(msgspec.Struct, frozen=True, kw_only=True):
    """``watched.json``: the job of the folder."""

    job_id: str = ""
    number: str = ""
    user: str = ""
    submit_time: float | None = None


def load_watched_job(run: RunDir) -> WatchedJob | None:
    """Return the watched job of a run; None for other runs."""
    if not run.watched.exists():
        return None
    return json_files.convert_leniently(json_files.poll_document(run.watched), WatchedJob)


def create(job: SlurmJob, details: JobDetails) -> RunDir:
    """Create the run folder of a job.

    Raises:
        ConfigError: ``$CLUSTERTRAIN_HOME`` cannot be written.
    """
    run = run_dir.create_run(_name(job, details))
    try:
        spec = build_spec(job, details)
        watched = WatchedJob(job_id=job.job_id, number=job.number, user=job.user, submit_time=job.submit_time)
        fsio.write_json(run.watched, msgspec.to_builtins(watched))
        record = provenance.collect(sys.argv, Path.cwd(), None)
        fsio.write_json(run.record, {**record, "recipe_hash": hash_run_spec(spec)})
        if details.output and Path(details.output).is_file():
            run.job_log.symlink_to(details.output)
        log = EventLog(run.events / "submit.jsonl")
        log.write("submitted", t=job.submit_time or clock.now(), job_id=job.job_id, backend="slurm")
        log.close()
        # Last, since the folder counts as a run from here on.
        fsio.write_text(run.spec, tomli_w.dumps(_without_none(msgspec.to_builtins(spec))), mode=0o600)
    except BaseException:
        remove(run)
        raise
    return run


def remove(run: RunDir) -> None:
    """Remove a run folder in which nothing was recorded."""
    shutil.rmtree(run.path, ignore_errors=True)


def _name(job: SlurmJob, details: JobDetails) -> str:
    return details.name or f"job-{job.number}"


def build_spec(job: SlurmJob, details: JobDetails) -> RunSpec:
    """Return the spec of a watched job: its size, and the batch script as its program."""
    gpus = max((group.gpus for group in details.groups), default=0)
    words = tuple(details.command.split()) or (_name(job, details),)
    return RunSpec(
        watched=True,
        job=JobSpec(
            name=_name(job, details),
            nodes=max(1, len(job.nodes)),
            gpus=max(1, gpus),
            backend="slurm",
            device="cuda" if gpus else "cpu",
            max_requeues=0,
        ),
        script=ScriptSpec(cwd=details.work_dir or "/", command=words),
    )


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    """Return ``value`` without None, which TOML lacks."""
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in value.items() if v is not None}


def claim_attempt(run: RunDir, job: SlurmJob) -> AttemptDir:
    """Return the attempt of this start of the job, which is created if it is new.

    Raises:
        ClusterTrainError: another process creates it at the same moment.
    """
    last = next(iter(reversed(attempts.load_attempts(run))), None)
    if last is not None and last.restart == job.restart and last.ending is None:
        return run.attempt(last.n)
    n = 1 if last is None else last.n + 1
    staging = run.attempts_folder / f".claim-{socket.gethostname()}-{os.getpid()}"
    fsio.claim_folder(staging)
    attempt = AttemptDir(staging, n)
    fsio.write_json(
        attempt.record,
        {
            "job_id": job.job_id,
            "restart": job.restart,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "nodes": list(job.nodes),
            "t": job.start_time or clock.now(),
        },
    )
    if job.end_time is not None:
        fsio.write_json(attempt.deadline, {"end_time": job.end_time})
    for folder in (attempt.events, attempt.results, attempt.logs, attempt.telemetry):
        fsio.claim_folder(folder)
    if not fsio.rename_folder(staging, run.attempt(n).path):
        shutil.rmtree(staging, ignore_errors=True)
        raise ClusterTrainError(f"{run.id}: attempt {n} was created by another process", fix="try again")
    return run.attempt(n)


def close_attempts(run: RunDir, job: SlurmJob | None) -> None:
    """Record how attempts ended that are not the current start of the job; None: the job is over."""
    for attempt in attempts.load_attempts(run):
        if attempt.ending is None and (job is None or attempt.restart != job.restart or job.is_pending):
            row = _find_start(attempt.job_id, attempt.start)
            _record_end(run.attempt(attempt.n), row, is_over=job is None, job_id=attempt.job_id)


def _find_start(job_id: str, start: float | None) -> JobStart | None:
    """Return the accounting's row of an attempt; None without one."""
    try:
        rows = [row for row in SlurmBackend().list_starts(job_id) if row.start is not None]
    except ClusterTrainError:
        return None
    near = [row for row in rows if start is None or abs((row.start or 0.0) - start) < _START_TOLERANCE_S]
    return near[-1] if near else None


def _record_end(attempt: AttemptDir, row: JobStart | None, *, is_over: bool, job_id: str) -> None:
    state = row.state if row is not None else ""
    ending = endings.COMPLETED if state == "COMPLETED" else endings.from_scheduler_state(state)
    log = EventLog(attempt.events_path("watch"))
    with contextlib.closing(log):
        log.write("ended", ending=ending, reason=_describe_end(row), job_id=job_id, ended_at=row.end if row else None)
        if not is_over:
            log.write("requeued", method="slurm", job_id=job_id)
        elif ending not in (endings.COMPLETED, endings.CANCELLED):
            log.write("stopped", reason=f"the job has ended{f': {state}' if state else ''}")


def _describe_end(row: JobStart | None) -> str | None:
    if row is None or row.state == "COMPLETED":
        return None
    code = f", exit code {row.exit_code}" if row.exit_code else ""
    return f"Slurm reports {row.state}{code}"
