"""The main job on Slurm with its ranks in containers: one job, four runtimes, one changed key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain.run.state import FINAL
from tests import containers, runs
from tests.runs import Run

pytestmark = pytest.mark.slurm
STEPS = 150


def test_main_job_in_containers_is_preempted_requeued_resumed_and_reported(
    env: dict[str, str], preempt: Callable[[Run], None], tmp_path: Path
) -> None:
    for runtime in containers.RUNTIMES:
        containers.require(runtime)
    bundle = containers.write_bundle(tmp_path)
    recipe = runs.write_recipe(tmp_path, steps=STEPS)
    more = {"PATH": containers.runtime_path(tmp_path), "PYTHONPATH": str(containers.ROOT)}
    options = (f"--container={bundle}", *containers.mount_options(), "--env", f"PYTHONPATH={containers.ROOT}")
    options += ("--env", "OMP_NUM_THREADS=1")  # the four runs share the machine's cores
    submitted = {
        runtime: runs.submit(
            {**env, **more}, *options, f"--container-runtime={runtime}", "--gpus=1", "--device=cpu", str(recipe)
        )
        for runtime in containers.RUNTIMES
    }
    try:
        # One node for each: the job that preempts takes all four.
        for run in submitted.values():
            run.wait_for_step(5)
        preempt(submitted["podman"])
        for runtime, run in submitted.items():
            status = run.complete()
            assert run.endings() == ["preempted", "completed"], runtime
            assert runs.resumed_at_the_next_step(status), runtime
            report = json.loads(run.call("telemetry", run.id, "--json").stdout)
            assert (report["training"]["steps"], len(report["attempts"])) == (STEPS, 2)
    finally:
        for run in submitted.values():
            if run.poll_status()["state"] not in FINAL:
                run.call("cancel", run.id, check=False)
