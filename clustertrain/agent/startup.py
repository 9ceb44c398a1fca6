"""The start of the batch process, which waits for a run folder that is temporarily unavailable."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from clustertrain import clock, fsio, settings
from clustertrain.agent.claim import Claim, claim_attempt, identify_job
from clustertrain.config.job import RunSpec
from clustertrain.errors import EXIT_FAILED, EXIT_STOPPED, ClusterTrainError
from clustertrain.run.run_dir import RunDir, open_run
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.backend import Backend

PATIENCE_S = 300.0
RETRY_S = 5.0
MAX_REQUEUES = 20  # restarts of the job after which it fails instead


def claim_run(backend: Backend) -> tuple[RunDir, RunSpec, Claim]:
    """Open the run and claim an attempt.

    Raises:
        ClusterTrainError: this job must not, or cannot, run it.
        OSError: the run folder is still read-only, full or unreachable after :data:`PATIENCE_S`.
    """
    deadline = clock.monotonic() + PATIENCE_S
    while True:
        try:
            run = open_run(Path(os.environ[settings.RUN_DIR]))
            fsio.set_group_umask(run.path)
            return run, load_spec(run), claim_attempt(run, identify_job(os.environ, backend), backend)
        except OSError as e:
            print(f"clustertrain batch: waiting for the run folder: {e}", file=sys.stderr, flush=True)
            if clock.monotonic() >= deadline:
                raise
            clock.sleep(RETRY_S)


def requeue_or_fail(backend: Backend, e: OSError) -> int:
    """Requeue the job to release its nodes, or let it fail; return the exit code."""
    job_id = backend.current_job_id(os.environ)
    restarts = int(os.environ.get(settings.SLURM_RESTART_COUNT) or 0)
    if job_id is not None and backend.name == "slurm" and restarts < MAX_REQUEUES:
        with contextlib.suppress(ClusterTrainError, OSError):
            backend.requeue(job_id)
            print(f"clustertrain batch: requeued: {e}", file=sys.stderr, flush=True)
            return EXIT_STOPPED
    print(f"clustertrain batch: {e}", file=sys.stderr, flush=True)
    return EXIT_FAILED
