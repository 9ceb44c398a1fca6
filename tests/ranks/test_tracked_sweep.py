"""Results and trackers of a sweep of two runs on the local backend, each of which is preempted once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clustertrain.run import events, metrics
from clustertrain.run.run_dir import RunDir
from tests import runs
from tests.runs import LOCAL, Run
from tests.unit.tracking import reading_back

pytestmark = pytest.mark.ranks
STEPS = 200  # enough that the preemption, which is an external signal, comes before the end
TABLES = """
[schedule]
warmup_steps = 2
[tracking]
trackers = ["tensorboard", "wandb"]
offline = true
[preemption_test]
preempt_at_steps = [10]
"""


def test_sweep_with_preempted_runs(tmp_path: Path) -> None:
    clean_env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_", "WANDB_"))}
    env = {**clean_env, "CLUSTERTRAIN_HOME": str(tmp_path / "home")}
    recipe = runs.write_recipe(tmp_path, steps=STEPS, more=TABLES, paced=False)
    args = ("--grid", "optim.lr=log:1e-5:1e-2:2", *LOCAL, "--gpus", "1", str(recipe))
    sweep = json.loads(runs.call(env, "sweep", "--json", *args).stdout)
    sweep_runs = [Run(env, row) for row in sweep["runs"]]
    try:
        for run in sweep_runs:
            run.complete()
    finally:
        runs.call(env, "cancel", sweep["sweep"], check=False)
    results = json.loads(runs.call(env, "sweep", "show", sweep["sweep"], "--json").stdout)
    assert [(r["values"], r["state"], r["attempts"], r["step"]) for r in results["runs"]] == [
        ({"optim.lr": lr}, "completed", 2, STEPS) for lr in (1e-2, 1e-5)
    ]
    assert results["best"] == sweep_runs[1].id and results["metric"] == "loss"
    compared = json.loads(runs.call(env, "compare", sweep["sweep"], "--by", "tokens", "--json").stdout)
    assert compared["winner"] == sweep_runs[1].id
    assert [s["key"] for s in compared["settings"]] == ["recipe.optim.lr"]
    for run, side in zip(sweep_runs, compared["runs"], strict=True):
        folder = RunDir(run.path)
        rows = metrics.load_rows(folder)
        assert [r["step"] for r in rows] == list(range(1, STEPS + 1)) and {r["attempt"] for r in rows} == {1, 2}
        points = [(r["step"], pytest.approx(r["loss"])) for r in rows]
        assert reading_back.tensorboard(folder) == points and reading_back.wandb(folder) == points, run.explain()
        assert list(zip(side["curves"]["loss"]["steps"], side["curves"]["loss"]["y"], strict=True)) == points
        assert side["tokens"] == STEPS * 16 * 64
        failures = [e for a in folder.attempts() for e in events.for_attempt(a) if e["event"] == "tracking_failed"]
        # On a busy machine, two seconds before a preemption may not suffice; nothing is lost then.
        assert [e["reason"] for e in failures if not e["reason"].startswith("not finished after 2 s")] == []
