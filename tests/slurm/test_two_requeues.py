"""A run whose processes were killed, and two commands that continue it simultaneously."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.runs import CLI, Run

pytestmark = pytest.mark.slurm


def test_one_of_two_concurrent_requeues_continues_run(
    cluster: Any, submit_run: Callable[..., Run], tmp_path: Path
) -> None:
    recipe = runs.write_recipe(tmp_path, steps=80, every=10)
    run = submit_run("--nodes", "1", "--gpus", "1", "--cpus-per-gpu", "1", str(recipe))
    run.wait_for_step(15)
    # Kill the batch process and the agent: an agent that outlives its batch process requeues the job.
    cluster.run("scancel", "--signal=KILL", "--full", run.job_id)
    run.wait_until_final()
    commands = [
        subprocess.Popen([*CLI, "requeue", run.id], env=run.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    answers = [command.communicate(timeout=120) for command in commands]
    codes = [command.returncode for command in commands]
    assert sorted(codes) == [0, 1], answers
    message = answers[codes.index(1)][1].decode()
    assert "is being continued by another command" in message or "as job" in message
    status = run.complete()
    assert len(status["attempts"]) == 2, run.explain()
    assert_attempts_do_not_overlap(run)


def assert_attempts_do_not_overlap(run: Run) -> None:
    """Assert, from the times of the steps, that each attempt starts after the earlier one has ended."""
    rows = [
        [json.loads(line)["t"] for line in path.read_text().splitlines()]
        for path in sorted(run.path.glob("metrics/attempt-*.jsonl"))
    ]
    assert len(rows) > 1
    assert all(max(earlier) < min(later) for earlier, later in itertools.pairwise(rows)), run.explain()
