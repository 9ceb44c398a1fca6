"""The local backend: jobs without a scheduler, on this machine, through the same job.sh, agents and requeue decision.

A job is a folder ``$CLUSTERTRAIN_HOME/local/<n>``. Its supervisor, a detached process, plays slurmctld for it: runs
job.sh, delivers warnings and kills, restarts on request. Closing the terminal does not end it.
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
from clustertrain.config.time_limits import seconds_of
from clustertrain.errors import CommandFailed, SchedulerRefused
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.backend import ENDED, PENDING, ArraySubmission, Backend, JobStart, JobView, Submission

PREFIX = "local-"
START_TIMEOUT_S = 30.0


class LocalJob(msgspec.Struct, kw_only=True):
    """``job.json``: written by submit once, by the supervisor from then on."""

    job_id: str
    run_dir: str
    nodes: int = 1
    after: str = ""  # the job of the same sweep that must be over first
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
    """Paths of one local job, and its record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / "job.json"
        self.cancel = path / "cancel-requested"
        self.requeue = path / "requeue-requested"
        self.log = path / "supervisor.log"

    def read(self) -> LocalJob | None:
        try:
            return reading.read_struct(self.record, LocalJob)
        except FileNotFoundError:
            return None

    def write(self, job: LocalJob) -> None:
        fsio.write_bytes(self.record, msgspec.json.format(msgspec.json.encode(job), indent=1) + b"\n")


def jobs_folder() -> Path:
    return settings.home() / "local"


def folder_of(job_id: str) -> JobFolder:
    return JobFolder(jobs_folder() / job_id.removeprefix(PREFIX))


def _claim() -> JobFolder:
    parent = jobs_folder()
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        n = max((int(p.name) for p in parent.iterdir() if reading.is_count(p.name)), default=0) + 1
        if fsio.claim_folder(parent / str(n)):
            return JobFolder(parent / str(n))


def supervisor_alive(job: LocalJob) -> bool:
    """Process ids are reused; the creation time tells the supervisor from whoever came after it."""
    try:
        process = psutil.Process(job.pid)
        return abs(process.create_time() - job.pid_created) < 2.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class LocalBackend(Backend):
    name = "local"

    def submit(self, submission: Submission) -> str:
        return self._submit(submission)

    def submit_array(self, array: ArraySubmission) -> list[str]:
        at_once = array.at_once or 1  # they share this machine
        job_ids: list[str] = []
        try:
            for n, run in enumerate(array.runs):
                after = job_ids[n - at_once] if n >= at_once else ""
                job_ids.append(self._submit(Submission(run, environ=array.environ), after))
        except BaseException:
            self.cancel(*job_ids)
            clock.wait_until(lambda: not any(v.alive for v in self.views(job_ids).values()), START_TIMEOUT_S)
            raise
        return job_ids

    def _submit(self, submission: Submission, after: str = "") -> str:
        spec = load_spec(submission.run)
        folder = _claim()
        job_id = f"{PREFIX}{folder.path.name}"
        folder.write(
            LocalJob(
                job_id=job_id,
                run_dir=str(submission.run.path),
                nodes=spec.job.nodes,
                after=after,
                reason=f"waits for {after}" if after else "",
                time_limit_s=seconds_of(submission.options.get("time", spec.job.time)),
                grace_s=spec.recipe.rehearsal.grace_s,
                preempt_at_steps=spec.recipe.rehearsal.preempt_at_steps,
            )
        )
        env = settings.without_allocation(submission.environ if submission.environ is not None else os.environ)
        argv = proc.python_module(sys.executable, "clustertrain.scheduler.local_supervisor", str(folder.path))
        child = proc.start(argv, env=env, cwd=submission.run.path, log=folder.log, new_session=True)

        def answered() -> bool:
            job = folder.read()
            return (job is not None and job.pid != 0) or child.poll() is not None

        if not clock.wait_until(answered, START_TIMEOUT_S, 0.02) or (child.poll() or 0) != 0:
            raise SchedulerRefused(f"the local supervisor did not start: {folder.log.read_text().strip()}")
        child.returncode = 0  # it lives on by itself; nobody waits for it here
        return job_id

    def advice(self, partition: str) -> list[str]:
        return []

    def cancel(self, *job_ids: str) -> None:
        for folder in map(folder_of, job_ids):
            if folder.path.is_dir():
                folder.cancel.touch()

    def requeue(self, job_id: str) -> None:
        folder = folder_of(job_id)
        job = folder.read()
        if job is None or not supervisor_alive(job):
            raise SchedulerRefused(f"{job_id} is not running any more")
        fsio.write_json(folder.requeue, {})

    def views(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        found = {}
        for job_id in job_ids:
            try:
                job = folder_of(job_id).read()
            except OSError as e:
                raise CommandFailed(f"{folder_of(job_id).record}: cannot be read: {e.strerror or e}") from e
            if job is not None:
                found[job_id] = _view(job)
        return found

    def starts(self, job_id: str) -> list[JobStart]:
        job = folder_of(job_id).read()
        if job is None:
            return []
        starts = [schema.convert({**s, "job_id": job_id}, JobStart) for s in job.starts]
        view = _view(job)
        if not view.alive and job.state not in ENDED:
            # The start that was under way when the supervisor died; nobody was left to write it down.
            starts.append(JobStart(job_id=job_id, state=view.state, start=job.start_time, reason=view.reason))
        return starts

    def restart(self, job_id: str, submission: Submission) -> str:
        # By the same supervisor: a second one, started from here, would be a process of this job and go down with it.
        folder = folder_of(job_id)
        fsio.write_json(folder.requeue, {"time": submission.options.get("time")})
        return job_id

    def own_job_id(self, environ: Mapping[str, str]) -> str | None:
        path = environ.get(settings.LOCAL_JOB)
        return f"{PREFIX}{Path(path).name}" if path else None

    def own_nodes(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        path = environ.get(settings.LOCAL_JOB)
        job = JobFolder(Path(path)).read() if path else None
        return tuple(node_names(job.nodes)) if job else ()


def node_names(nodes: int) -> list[str]:
    """The simulated nodes."""
    return [f"local{i}" for i in range(nodes)]


def _view(job: LocalJob) -> JobView:
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
    if view.alive and not starting and job.host != socket.gethostname():
        raise CommandFailed(f"{job.job_id} runs on {job.host}: whether its supervisor lives can be told there only")
    if view.alive and not starting and not supervisor_alive(job):
        reason = "its supervisor is gone: it was killed, or the machine was restarted"
        return JobView(job_id=job.job_id, state="NODE_FAIL", reason=reason, restarts=job.restarts)
    return view
