"""From what the user typed to the job to watch, with the reason if it cannot be watched."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

from clustertrain import clock
from clustertrain.errors import ClusterTrainError, NotFound, SchedulerError, UnsuitableEnvironment, UsageError
from clustertrain.run import lookup
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import TERMINAL_STATES
from clustertrain.scheduler.slurm import SlurmBackend
from clustertrain.scheduler.slurm_job import SlurmJob, query_job

MIN_POLL_S, MAX_POLL_S = 1.0, 15.0
_MAX_LISTED = 8


def check_job_id(text: str) -> None:
    """Raise UsageError if ``text`` is not the id of a job or of an array task."""
    if re.fullmatch(r"[1-9][0-9]{0,9}(_[0-9]{1,9})?", text):
        return
    fix = "`squeue --me` lists the ids of your jobs"
    if re.fullmatch(r"[0-9]+(_[0-9]+)?\.\w+", text):
        fix = f"watch the whole job: clustertrain watch {text.partition('.')[0]}"
    elif re.fullmatch(r"[0-9]+\+[0-9]+", text):
        raise UsageError(f"{text}: {_HETEROGENEOUS}", fix=_HETEROGENEOUS_FIX)
    elif re.fullmatch(r"[0-9]+_\[.*\]", text):
        fix = f"name one task: clustertrain watch {text.partition('_')[0]}_0"
    raise UsageError(f"{text!r} is not the id of a Slurm job", fix=fix)


def check_slurm() -> None:
    """Raise UnsuitableEnvironment if Slurm's commands are not installed here."""
    missing = [name for name in ("squeue", "scontrol", "srun") if shutil.which(name) is None]
    if missing:
        raise UnsuitableEnvironment(
            f"{' and '.join(missing)}: not installed on this machine", fix="run it on a login node of the cluster"
        )


def find_job(job_id: str) -> SlurmJob:
    """Return a job that is pending or running.

    Raises:
        UsageError: it is an array with several tasks, or a heterogeneous job.
        NotFound: Slurm does not know it, or it has ended.
    """
    jobs = query_job(job_id)
    if not jobs:
        raise NotFound(f"Slurm does not know job {job_id}{_describe_past(job_id)}", fix=_RUNNING_ONLY)
    if any(job.is_heterogeneous for job in jobs):
        raise UsageError(f"{job_id}: {_HETEROGENEOUS}", fix=_HETEROGENEOUS_FIX)
    alive = [job for job in jobs if job.state not in TERMINAL_STATES]
    if len(alive) > 1:
        names = ", ".join(job.job_id for job in sorted(alive, key=lambda j: (not j.is_running, int(j.number))))
        more = f" and {len(alive) - _MAX_LISTED} more" if len(alive) > _MAX_LISTED else ""
        shown = ", ".join(names.split(", ")[:_MAX_LISTED])
        raise UsageError(f"{job_id} is an array of {len(alive)} tasks", fix=f"name one of {shown}{more}")
    if not alive:
        raise NotFound(f"job {job_id} has ended: {jobs[-1].state}", fix=_RUNNING_ONLY)
    return alive[0]


_RUNNING_ONLY = "only a running job can be watched; `squeue --me` lists yours"
_HETEROGENEOUS = "a heterogeneous job has several sets of nodes, and a step that samples must be part of one of them"
_HETEROGENEOUS_FIX = "use `nvidia-smi` on its nodes, or a job with one set of nodes"


def _describe_past(job_id: str) -> str:
    """Return how a job ended that only the accounting remembers; empty without accounting."""
    try:
        starts = SlurmBackend().list_starts(job_id)
    except ClusterTrainError:
        return ""
    return f" any more: it has ended ({starts[-1].state})" if starts else ""


def check_not_a_run(job_id: str) -> None:
    """Raise UsageError if the job runs clustertrain, which records telemetry by itself."""
    for run in lookup.list_runs_with_job(job_id):
        if not run.watched.exists():
            raise UsageError(
                f"job {job_id} is the run {run.id}, which records its telemetry itself",
                fix=f"clustertrain top {run.id}, or clustertrain telemetry {run.id}",
            )


def wait_for_start(job: SlurmJob, on_wait: Callable[[SlurmJob], object]) -> SlurmJob:
    """Wait until the job runs. ``on_wait`` is called once, before the first wait.

    Raises:
        NotFound: it has ended in the queue.
    """
    poll_s, told = MIN_POLL_S, False
    while not job.is_running:
        if not job.is_pending:
            raise SchedulerError(f"job {job.job_id} is {job.state}", fix=_RUNNING_ONLY)
        if not told:
            told = True
            on_wait(job)
        clock.sleep(poll_s)
        poll_s = min(poll_s * 1.5, MAX_POLL_S)
        job = find_job(job.job_id)
    return job


def find_watched_run(job: SlurmJob) -> RunDir | None:
    """Return the run folder of an earlier ``watch`` of this job; None if there is none.

    Slurm may use a number again after its database was erased, so the time of the submission counts too.
    """
    from clustertrain.watch.run_folder import load_watched_job

    for run in lookup.list_runs():
        known = load_watched_job(run)
        if known is not None and (known.job_id, known.submit_time) == (job.job_id, job.submit_time):
            return run
    return None
