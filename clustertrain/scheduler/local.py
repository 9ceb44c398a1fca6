"""The local backend: jobs without a scheduler, on this machine, through the same job.sh, agents and requeue decision.

A job is a folder ``$CLUSTERTRAIN_HOME/local/<n>``. Its supervisor, a detached process, stands in for slurmctld: it runs
job.sh, sends warnings, kills, and restarts on request. It survives the closing of the terminal.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from clustertrain import clock, fsio, proc, reading, schema, settings
from clustertrain.config.parsing.time_limits import parse_time_limit_s
from clustertrain.errors import CommandFailed, SchedulerError
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.backend import (
    PENDING,
    TERMINAL_STATES,
    ArraySubmission,
    Backend,
    JobStart,
    JobView,
    Submission,
)

PREFIX = "local-"
START_TIMEOUT_S = 30.0


class LocalJob(msgspec.Struct, kw_only=True):
    """The content of ``job.json``, which submit writes once and then only the supervisor."""

    job_id: str
    run_dir: str
    nodes: int = 1
    depends_on: str = ""
    """Id of a job of the same sweep that must end first."""
    state: str = PENDING
    reason: str = ""
    restarts: int = 0
    pid: int = 0
    pid_created: float = 0.0
    host: str = ""
    time_limit_s: float | None = None
    grace_s: float = 30.0
    preempt_at_steps: tuple[int, ...] = ()
    start_time: float | None = None
    end_time: float | None = None
    preempt_time: float | None = None
    starts: list[dict[str, Any]] = []


class JobFolder:
    """The folder of a local job, with its record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record_file = path / "job.json"
        self.cancel_file = path / "cancel-requested"
        self.requeue_file = path / "requeue-requested"
        self.log = path / "supervisor.log"

    def read(self) -> LocalJob | None:
        try:
            return reading.read_struct(self.record_file, LocalJob)
        except FileNotFoundError:
            return None

    def write(self, job: LocalJob) -> None:
        fsio.write_bytes(self.record_file, msgspec.json.format(msgspec.json.encode(job), indent=1) + b"\n")


def jobs_root() -> Path:
    return settings.home() / "local"


def job_folder(job_id: str) -> JobFolder:
    return JobFolder(jobs_root() / job_id.removeprefix(PREFIX))


def _claim_job_folder() -> JobFolder:
    parent = jobs_root()
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        n = max((int(p.name) for p in parent.iterdir() if reading.is_unsigned_int(p.name)), default=0) + 1
        if fsio.claim_folder(parent / str(n)):
            return JobFolder(parent / str(n))


def is_supervisor_alive(job: LocalJob) -> bool:
    """Return whether the supervisor runs. Pids are reused, so the creation time has to match too."""
    try:
        process = psutil.Process(job.pid)
        return abs(process.create_time() - job.pid_created) < 2.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class LocalBackend(Backend):
    """Jobs on this machine, each with a supervisor process."""

    name = "local"

    def submit(self, submission: Submission) -> str:
        return self._submit(submission)

    def submit_array(self, array: ArraySubmission) -> list[str]:
        max_concurrent = array.max_concurrent or 1  # by default one: the runs share this machine
        job_ids: list[str] = []
        try:
            for n, run in enumerate(array.runs):
                depends_on = job_ids[n - max_concurrent] if n >= max_concurrent else ""
                job_ids.append(self._submit(Submission(run, environ=array.environ), depends_on))
        except BaseException:
            self.cancel(*job_ids)
            clock.wait_until(lambda: not any(v.is_alive for v in self.query_jobs(job_ids).values()), START_TIMEOUT_S)
            raise
        return job_ids

    def _submit(self, submission: Submission, depends_on: str = "") -> str:
        spec = load_spec(submission.run)
        folder = _claim_job_folder()
        job_id = f"{PREFIX}{folder.path.name}"
        folder.write(
            LocalJob(
                job_id=job_id,
                run_dir=str(submission.run.path),
                nodes=spec.job.nodes,
                depends_on=depends_on,
                reason=f"waits for {depends_on}" if depends_on else "",
                time_limit_s=parse_time_limit_s(submission.options.get("time", spec.job.time)),
                grace_s=spec.recipe.preemption_test.grace_s,
                preempt_at_steps=spec.recipe.preemption_test.preempt_at_steps,
            )
        )
        env = settings.strip_allocation_env(submission.environ if submission.environ is not None else os.environ)
        argv = proc.python_module_argv(sys.executable, "clustertrain.scheduler.local_supervisor", str(folder.path))
        child = proc.start(argv, env=env, cwd=submission.run.path, log=folder.log, new_session=True)

        def has_responded() -> bool:
            job = folder.read()
            return (job is not None and job.pid != 0) or child.poll() is not None

        if not clock.wait_until(has_responded, START_TIMEOUT_S, 0.02) or (child.poll() or 0) != 0:
            output = folder.log.read_text().strip() or "it printed nothing; check that the disk is not full"
            raise SchedulerError(f"the local supervisor did not start ({folder.log}): {output}")
        child.returncode = 0  # it outlives this process, which need not wait for it
        return job_id

    def advice(self, partition: str) -> list[str]:
        return []

    def cancel(self, *job_ids: str) -> None:
        for folder in map(job_folder, job_ids):
            if folder.path.is_dir():
                folder.cancel_file.touch()

    def requeue(self, job_id: str) -> None:
        folder = job_folder(job_id)
        job = folder.read()
        if job is None or not is_supervisor_alive(job):
            raise SchedulerError(f"{job_id} no longer runs")
        fsio.write_json(folder.requeue_file, {})

    def query_jobs(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        jobs = {}
        for job_id in job_ids:
            try:
                job = job_folder(job_id).read()
            except OSError as e:
                raise CommandFailed(f"{job_folder(job_id).record_file}: cannot be read: {e.strerror or e}") from e
            if job is not None:
                jobs[job_id] = _job_view(job)
        return jobs

    def list_starts(self, job_id: str) -> list[JobStart]:
        job = job_folder(job_id).read()
        if job is None:
            return []
        starts = [schema.convert({**s, "job_id": job_id}, JobStart) for s in job.starts]
        view = _job_view(job)
        if not view.is_alive and job.state not in TERMINAL_STATES:
            # The supervisor died during this start and could not record it.
            starts.append(JobStart(job_id=job_id, state=view.state, start=job.start_time, reason=view.reason))
        return starts

    def restart(self, job_id: str, submission: Submission) -> str:
        # By the same supervisor: a new one, started here, would be a process of this job and end with it.
        folder = job_folder(job_id)
        fsio.write_json(folder.requeue_file, {"time": submission.options.get("time")})
        return job_id

    def current_job_id(self, environ: Mapping[str, str]) -> str | None:
        path = environ.get(settings.LOCAL_JOB)
        return f"{PREFIX}{Path(path).name}" if path else None

    def current_nodes(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        path = environ.get(settings.LOCAL_JOB)
        job = JobFolder(Path(path)).read() if path else None
        return tuple(node_names(job.nodes)) if job else ()


def node_names(nodes: int) -> list[str]:
    """Return the names of the simulated nodes."""
    return [f"local{i}" for i in range(nodes)]


def _job_view(job: LocalJob) -> JobView:
    view = JobView(
        job_id=job.job_id,
        state=job.state,
        reason=job.reason,
        restarts=job.restarts,
        start_time=job.start_time,
        end_time=job.end_time,
        preempt_time=job.preempt_time,
        nodes=tuple(node_names(job.nodes)),
    )
    starting = job.pid == 0
    if view.is_alive and not starting and job.host != socket.gethostname():
        raise CommandFailed(f"{job.job_id} runs on {job.host}, and its supervisor can only be checked there")
    if view.is_alive and not starting and not is_supervisor_alive(job):
        reason = "its supervisor is gone: killed, or the machine was restarted"
        return JobView(job_id=job.job_id, state="NODE_FAIL", reason=reason, restarts=job.restarts)
    return view
