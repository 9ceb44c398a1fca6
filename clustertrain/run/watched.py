"""Runs that only watch a job, which was started without clustertrain: ``clustertrain watch``."""

from __future__ import annotations

from clustertrain.errors import UsageError
from clustertrain.run import attempts
from clustertrain.run.run_dir import RunDir


def refuse_watched(run: RunDir, verb: str, fix: str) -> None:
    """Raise UsageError if ``run`` is only watched, so that ``verb`` would not act on its job.

    ``{job}`` in ``fix`` is replaced by the job's id.
    """
    if not run.watched.exists():
        return
    job = next(iter(reversed(attempts.list_job_ids(run))), "JOBID")
    raise UsageError(
        f"{verb}: {run.id} only watches job {job}, which was started without clustertrain", fix=fix.format(job=job)
    )
