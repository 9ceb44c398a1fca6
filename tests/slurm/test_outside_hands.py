"""External events during a run: slurmctld stops, an administrator requeues, signals or shortens the job, the batch
process is killed, the disk is read-only for a while. The run continues, and its ending names the cause."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import runs
from tests.runs import Run

pytestmark = pytest.mark.slurm
ONE_NODE = ("--nodes", "1", "--gpus", "1", "--cpus-per-gpu", "1", "--time", "60")
PREEMPTOR = ("-N1", "--exclusive", "-o", "/dev/null", "--wrap", "true")
# The first attempt is slow enough for the event to reach it. A resumed attempt ends quickly.
SCRIPT = """
import time
import torch
import clustertrain as ct

first = None
with ct.session() as session:
    model = session.parallelize(torch.nn.Linear(8, 8))
    for step in session.steps(total=600, state={"model": model}, checkpoint_every=1000):
        first = step if first is None else first
        if first == 0:
            time.sleep(0.25)
"""


@pytest.fixture
def slow(tmp_path: Path) -> str:
    script = tmp_path / "slow.py"
    script.write_text(SCRIPT)
    return str(script)


@pytest.fixture
def controller(cluster: Any) -> Iterator[Any]:
    """A cluster whose slurmctld is started again after the test."""
    yield cluster
    cluster.up()


def job_log(run: Run) -> str:
    return (run.path / "job.log").read_text(errors="replace")


def test_runs_wait_for_slurmctld_and_can_be_cancelled(
    controller: Any, submit_run: Callable[..., Run], slow: str
) -> None:
    # Each run is alone on its node, so that only one of them is preempted.
    requeued, preempted, cancelled = all_runs = [submit_run(*ONE_NODE, "--sbatch", "exclusive", slow) for _ in range(3)]
    runs.at_step(5, dict.fromkeys(all_runs, lambda _: None))
    controller.run("sbatch", "-p", "high", "-w", preempted.status()["attempts"][0]["nodes"][0], *PREEMPTOR)
    preempt_time = ("squeue", "-h", "-j", preempted.job_id, "-O", "PreemptTime")
    controller.wait_for(lambda: controller.run(*preempt_time).stdout.strip() != "N/A", 30, "the preemption")
    controller.stop_controller()
    # These requests are recorded although slurmctld is down.
    requeued.call("requeue", requeued.id)
    answer = json.loads(cancelled.call("cancel", cancelled.id, "--json").stdout)
    assert [row["state"] for row in answer["runs"]] == ["cancelling"]
    assert cancelled.call("list").stdout.count("states come from the run directories") == 1
    controller.wait_for(lambda: recorded_endings(cancelled) == ["cancelled"], 60, "the end of the cancelled attempt")
    for run in (requeued, preempted):
        controller.wait_for(
            lambda r=run: "no answer, retrying" in job_log(r), 90, f"a query without an answer: {job_log(run)}"
        )
    controller.up()
    for run in (requeued, preempted):
        run.complete()
        assert run.endings() == ["preempted", "completed"], run.explain()
    assert cancelled.wait_until_final()["state"] == "cancelled"
    assert cancelled.endings() == ["cancelled"]


def recorded_endings(run: Run) -> list[str]:
    """Return the endings in the run's own files."""
    lines = [line for path in run.path.glob("attempts/*/events/batch.jsonl") for line in path.read_text().splitlines()]
    return [e["ending"] for e in map(json.loads, lines) if e["event"] == "ended"]


def batch_process(run: Run) -> psutil.Process:
    record = json.loads((run.path / "attempts/1/attempt.json").read_text())
    return psutil.Process(record["pid"])


def test_ending_names_the_external_cause(cluster: Any, submit_run: Callable[..., Run], slow: str) -> None:
    requeued, signaled, shortened, killed = (submit_run(*ONE_NODE, slow) for _ in range(4))
    actions = {
        requeued: lambda run: cluster.run("scontrol", "requeue", run.job_id),
        signaled: lambda run: cluster.run("scancel", "-s", "TERM", run.job_id),
        shortened: lambda run: cluster.run("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=2"),
        killed: lambda run: batch_process(run).send_signal(signal.SIGKILL),
    }
    runs.at_step(5, actions)
    for run, ending in ((requeued, "preempted"), (signaled, "signal"), (shortened, "time_limit"), (killed, "unknown")):
        run.complete()
        assert run.endings() == [ending, "completed"], run.explain()
    for run, text in ((requeued, "scontrol requeue"), (signaled, "SIGTERM"), (killed, "batch process was killed")):
        assert text in run.status()["attempts"][0]["reason"]


def test_start_waits_for_read_only_run_folder(cluster: Any, submit_run: Callable[..., Run], slow: str) -> None:
    run = submit_run(*ONE_NODE, slow)
    run.wait_for_step(5)
    run.call("requeue", run.id)
    attempts = run.path / "attempts"
    cluster.wait_for(
        lambda: cluster.run("squeue", "-h", "-j", run.job_id, "-o", "%T").stdout.strip() == "PENDING", 60, "the requeue"
    )
    _mount("--bind", attempts, attempts)
    try:
        _mount("-o", "remount,ro,bind", attempts)
        cluster.wait_for(lambda: "waiting for the run folder" in job_log(run), 60, "the next start")
    finally:
        subprocess.run(["umount", "--lazy", attempts], check=True)
    run.complete()
    assert run.endings() == ["preempted", "completed"]


def _mount(*args: str | Path) -> None:
    subprocess.run(["mount", *args], check=True)
