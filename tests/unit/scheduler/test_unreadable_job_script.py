"""A job.sh that is not a regular file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clustertrain.scheduler import slurm


def test_submit_does_not_wait_for_a_job_script_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.sh")
    with pytest.raises(OSError, match=r"job\.sh"):
        slurm._sbatch(tmp_path, [], {})
