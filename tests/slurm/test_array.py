"""A sweep as a job array on the real cluster: one run at a time, one of them preempted, one cancelled in the queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
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

first_of_a = os.environ["WHO"] == "a" and os.environ["CLUSTERTRAIN_ATTEMPT"] == "1"
floor = {"a": 1.0, "b": 2.0, "c": 3.0}[os.environ["WHO"]]
total = 100_000 if first_of_a else 2_000 if os.environ["WHO"] == "a" else 3
with ct.session() as session:
    for step in session.steps(total=total, state={"done": 0}, checkpoint_every=100_000):
        session.log(loss=floor + 1 / (step + 1))
        time.sleep(0.02 * first_of_a)
"""


@dataclass
class Array:
    """The array after its end. ``early``: results while `a` ran; ``waiting``: status of `c` at that time."""

    env: dict[str, str]
    sweep: dict[str, Any]
    runs: tuple[Run, Run, Run]
    early: dict[str, Any]
    waiting: dict[str, Any]
    cancelled: tuple[str, int]  # state of `c`, and exit code of `wait` for it, directly after scancel


def show_results(env: dict[str, str], name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(runs.call(env, "sweep", "show", name, "--json").stdout)
    return results


@pytest.fixture(scope="module")
def array(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Array]:
    folder = tmp_path_factory.mktemp("array")
    env = {**cluster.env, "CLUSTERTRAIN_HOME": str(folder / "home")}
    (folder / "who.py").write_text(SCRIPT)
    args = ("--grid", "env.WHO=a,b,c", "--at-once", "1", "--device", "cpu", str(folder / "who.py"))
    sweep = json.loads(runs.call(env, "sweep", "--json", *args).stdout)
    a, b, c = (Run(env, row) for row in sweep["runs"])
    try:
        a.wait_for_step(1)
        early, waiting = show_results(env, sweep["job_id"]), c.status()
        cluster.run("scancel", c.job_id)
        # Slurm forgets the task at once.
        cancelled = c.status()["state"], runs.call(env, "wait", c.job_id, check=False).returncode
        # A job in the high partition takes all nodes briefly.
        cluster.run("sbatch", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "true")
        b.complete()
        a.complete()
        yield Array(env, sweep, (a, b, c), early, waiting, cancelled)
    finally:
        runs.call(env, "cancel", sweep["sweep"], check=False)


def test_array_of_three_runs_one_at_a_time(cluster: Any, array: Array) -> None:
    a, b, c = array.runs
    array_id = array.sweep["job_id"]
    assert [run.job_id for run in array.runs] == [f"{array_id}_{n}" for n in range(3)]
    assert (array.waiting["state"], array.waiting["pending_reason"]) == ("pending", "JobArrayTaskLimit")
    assert array.cancelled == ("cancelled", 1)
    done = runs.call(array.env, "wait", array.sweep["sweep"], check=False)
    ends = {f"{a.id}: completed", f"{b.id}: completed", f"{c.id}: cancelled"}
    assert (done.returncode, set(done.stderr.splitlines())) == (1, ends)
    assert (a.endings(), b.endings(), c.endings()) == (["preempted", "completed"], ["completed"], [])
    assert {at["job_id"] for at in a.status()["attempts"]} == {a.job_id}
    # Both starts wrote to the run's own log, through the sweep's link to it.
    assert (a.path / "job.log").read_text().count("clustertrain: attempt ") == 2

    def accounted() -> list[str]:
        return sorted(cluster.run("sacct", "-D", "-X", "-n", "-P", "-j", array_id, "-o", "JobID,State").stdout.split())

    rows = [f"{a.job_id}|COMPLETED", f"{a.job_id}|REQUEUED", f"{b.job_id}|COMPLETED"]
    assert clock.wait_until(lambda: accounted() == rows, 30), accounted()


def test_table_follows_requeued_task(array: Array) -> None:
    a, b, c = array.runs
    assert array.early["sweep"] == array.sweep["sweep"] and array.early["best"] == a.id
    assert [(r["run"], r["state"], r["attempts"]) for r in array.early["runs"]] == [
        (a.id, "running", 1), (b.id, "pending", 0), (c.id, "pending", 0)
    ]  # fmt: skip
    results = show_results(array.env, array.sweep["sweep"])
    rows = {r["run"]: r for r in results["runs"]}
    assert [(r["run"], r["values"], r["state"], r["attempts"]) for r in results["runs"]] == [
        (a.id, {"env.WHO": "a"}, "completed", 2),
        (b.id, {"env.WHO": "b"}, "completed", 1),
        (c.id, {"env.WHO": "c"}, "cancelled", 0),
    ]
    assert rows[b.id]["last"] == {"step": 3, "value": pytest.approx(2 + 1 / 3)}
    assert rows[a.id]["last"]["step"] == rows[a.id]["step"]
