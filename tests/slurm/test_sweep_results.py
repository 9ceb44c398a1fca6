"""``sweep`` on the real cluster: an array whose first task is preempted and requeued, and the results that follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.runs import Run

pytestmark = pytest.mark.slurm
# The first attempt of the first run continues until it gets a request to stop. All others end at once.
SCRIPT = """
import os, time
import clustertrain as ct

held = os.environ["WHO"] == "a" and os.environ["CLUSTERTRAIN_ATTEMPT"] == "1"
floor = {"a": 1.0, "b": 2.0}[os.environ["WHO"]]
with ct.session() as session:
    for step in session.steps(total=100_000 if held else step_count(), state={"done": 0}, checkpoint_every=100_000):
        session.log(loss=floor + 1 / (step + 1))
        time.sleep(0.02 * held)
""".replace("step_count()", "2_000 if os.environ['WHO'] == 'a' else 3")


def sweep_results(env: dict[str, str], name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(runs.call(env, "sweep", "show", name, "--json").stdout)
    return results


def test_table_follows_requeued_task(cluster: Any, tmp_path: Path) -> None:
    env = {**cluster.env, "CLUSTERTRAIN_HOME": str(tmp_path / "home")}
    (tmp_path / "who.py").write_text(SCRIPT)
    args = ("--grid", "env.WHO=a,b", "--at-once", "1", "--device", "cpu", str(tmp_path / "who.py"))
    sweep = json.loads(runs.call(env, "sweep", "--json", *args).stdout)
    a, b = (Run(env, row) for row in sweep["runs"])
    try:
        a.wait_for_step(1)
        results = sweep_results(env, sweep["job_id"])
        assert results["sweep"] == sweep["sweep"] and results["best"] == a.id
        assert [(r["run"], r["state"], r["attempts"]) for r in results["runs"]] == [
            (a.id, "running", 1), (b.id, "pending", 0)
        ]  # fmt: skip
        # A job in the high partition takes all nodes briefly.
        cluster.run("sbatch", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "true")
        b.complete()
        a.wait_until_final()
    finally:
        runs.call(env, "cancel", sweep["sweep"], check=False)
    results = sweep_results(env, sweep["sweep"])
    assert [(r["run"], r["values"], r["state"], r["attempts"]) for r in results["runs"]] == [
        (a.id, {"env.WHO": "a"}, "completed", 2), (b.id, {"env.WHO": "b"}, "completed", 1)
    ]  # fmt: skip
    assert results["runs"][1]["last"] == {"step": 3, "value": pytest.approx(2 + 1 / 3)}
    assert results["runs"][0]["last"]["step"] == results["runs"][0]["step"] and a.endings() == [
        "preempted",
        "completed",
    ]
