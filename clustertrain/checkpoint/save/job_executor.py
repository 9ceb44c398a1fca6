"""Runs the jobs of a save, in the writer process or, without one, in the rank itself."""

from __future__ import annotations

from collections.abc import Callable, Collection

from clustertrain import clock
from clustertrain.checkpoint.core.failures import failure_from_exception
from clustertrain.checkpoint.save import commit, node_local
from clustertrain.checkpoint.save.writer_jobs import CommitJob, JobOutcome, WriteJob, job_kind
from clustertrain.errors import CheckpointError


def perform(
    job: WriteJob | CommitJob,
    memory: memoryview | None,
    should_continue: Callable[[], bool],
    can_prune: Callable[[], bool],
    get_protected: Callable[[], Collection[int]] = tuple,
) -> JobOutcome:
    """Run ``job`` and return its outcome.

    Args:
        memory: the staging memory of a part; None copies the part from the node's own disk.
        should_continue, can_prune, get_protected: see :func:`~clustertrain.checkpoint.save.commit.commit`.
    """
    try:
        if isinstance(job, WriteJob):
            size = commit.write_and_mark_done(job, memory) if memory is not None else node_local.copy_to_shared(job)
            written = size
        else:
            manifest = commit.commit(job, should_continue, can_prune, get_protected)
            size, written = manifest.bytes, manifest.written_bytes
    except (OSError, CheckpointError) as e:
        failure = failure_from_exception(e)
        return JobOutcome(step=job.step, kind=job_kind(job), ended=clock.monotonic(), failure=failure)
    return JobOutcome(step=job.step, kind=job_kind(job), bytes=size, written=written, ended=clock.monotonic())
