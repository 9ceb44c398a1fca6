"""Data, tensor and pipeline parallelism at once, on the four hosts, from `clustertrain submit`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clustertrain.plan.layout import Layout
from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from tests import runs
from tests.paths import ROOT
from tests.ranks.rank_pool import Ranks, write_plan
from tests.runs import Run

pytestmark = pytest.mark.slurm
EXAMPLE = str(ROOT / "examples" / "three_d.toml")
# Eight ranks share a machine with few cores, so each step takes a second.
STEPS = 4
FEW_STEPS = ("--set", f"train.steps={STEPS}")
DEGREES = {"dp_replicate": 1, "dp_shard": 2, "tp": 2, "pp": 2, "cp": 1}


def losses(run: RunDir) -> list[float]:
    return [row["loss"] for row in metrics.load_rows(run)]


def run_one_process(submitted: Run, folder: Path) -> RunDir:
    """Run the same recipe in one process, without a layout."""
    run = RunDir(folder)
    (run.path / "attempts").mkdir(parents=True)
    shutil.copy(RunDir(submitted.path).spec, run.path)
    write_plan(run, Layout(), 1)
    Ranks(run, 1).expect(0)
    return run


def test_three_dimensions_on_four_hosts_equal_one_process(cluster: Any, tmp_path: Path) -> None:
    env = {**cluster.env, "CLUSTERTRAIN_HOME": str(tmp_path / "home")}
    run = runs.submit(env, "--backend", "slurm", *FEW_STEPS, EXAMPLE)
    try:
        status = run.complete()
    finally:
        run.cancel_if_active()
    assert run.endings() == ["completed"] and status["step"] == STEPS
    assert sorted(status["attempts"][0]["nodes"]) == ["node01", "node02", "node03", "node04"]
    newest = json.loads(runs.call(env, "checkpoint", "list", run.id, "--json").stdout)["checkpoints"][-1]
    assert DEGREES.items() <= newest["layout"].items()
    alone = run_one_process(run, tmp_path / "alone")
    assert len(losses(RunDir(run.path))) == STEPS
    assert losses(RunDir(run.path)) == pytest.approx(losses(alone), rel=2e-6)
