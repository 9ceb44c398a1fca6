"""A sweep as a job array on the real cluster: one run at a time, one of them preempted, one cancelled in the queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock
from tests import runs
from tests.runs import Run

pytestmark = pytest.mark.slurm
# The first attempt of run `a` continues until it gets a request to stop. All others end at once.
SCRIPT = """
import os, time
import clustertrain as ct

held = os.environ["WHO"] == "a" and os.environ["CLUSTERTRAIN_ATTEMPT"] == "1"
with ct.session() as session:
    for step in session.steps(total=100_000 if held else 3, state={"done": 0}, checkpoint_every=100_000):
        time.sleep(0.02)
"""


def test_array_of_three_runs_one_at_a_time(cluster: Any, tmp_path: Path) -> None:
    env = {**cluster.env, "CLUSTERTRAIN_HOME": str(tmp_path / "home")}
    (tmp_path / "who.py").write_text(SCRIPT)
    args = ("--grid", "env.WHO=a,b,c", "--at-once", "1", "--device", "cpu", str(tmp_path / "who.py"))
    sweep = json.loads(runs.call(env, "sweep", "--json", *args).stdout)
    a, b, c = (Run(env, row) for row in sweep["runs"])
    array = sweep["job_id"]
    assert [run.job_id for run in (a, b, c)] == [f"{array}_{n}" for n in range(3)]
    try:
        a.wait_for_step(1)
        waiting = c.status()
        assert (waiting["state"], waiting["pending_reason"]) == ("pending", "JobArrayTaskLimit")
        cluster.run("scancel", c.job_id)
        # Slurm forgets the task at once.
        assert c.status()["state"] == "cancelled"
        assert runs.call(env, "wait", c.job_id, check=False).returncode == 1

        # A job in the high partition takes all nodes briefly.
        cluster.run("sbatch", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "true")
        b.complete()
        a.complete()
        done = runs.call(env, "wait", sweep["sweep"], check=False)
        ends = {f"{a.id}: completed", f"{b.id}: completed", f"{c.id}: cancelled"}
        assert (done.returncode, set(done.stderr.splitlines())) == (1, ends)
    finally:
        runs.call(env, "cancel", sweep["sweep"], check=False)
    assert (a.endings(), b.endings(), c.endings()) == (["preempted", "completed"], ["completed"], [])
    assert {at["job_id"] for at in a.status()["attempts"]} == {a.job_id}
    # Both starts wrote to the run's own log, through the sweep's link to it.
    assert (a.path / "job.log").read_text().count("clustertrain: attempt ") == 2

    def accounted() -> list[str]:
        return sorted(cluster.run("sacct", "-D", "-X", "-n", "-P", "-j", array, "-o", "JobID,State").stdout.split())

    rows = [f"{a.job_id}|COMPLETED", f"{a.job_id}|REQUEUED", f"{b.job_id}|COMPLETED"]
    assert clock.wait_until(lambda: accounted() == rows, 30), accounted()
