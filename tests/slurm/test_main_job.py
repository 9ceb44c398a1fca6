"""The main job on the real cluster: preempted, out of time, cancelled, with a lost node. The final bits are equal."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clustertrain.run.run_dir import RunDir
from tests import runs
from tests.ranks.rank_pool import undisturbed
from tests.runs import Run

pytestmark = pytest.mark.slurm
# For tests that do not depend on the number of ranks: each rank takes seconds to import torch on two cores.
TWO_NODES = ("--nodes", "2", "--gpus", "1", "--cpus-per-gpu", "1")
ONE_NODE = ("--nodes", "1", "--gpus", "1", "--cpus-per-gpu", "1")


@pytest.mark.parametrize(("layout", "nodes", "times"), [("ddp", 4, 1), ("fsdp", 2, 2)])
def test_preempted_run_resumes_bit_exactly(
    cluster: Any,
    submit_run: Callable[..., Run],
    preempt: Callable[[Run], None],
    recipe: Path,
    tmp_path: Path,
    layout: str,
    nodes: int,
    times: int,
) -> None:
    run = submit_run("--nodes", str(nodes), "--gpus", "1", "--layout", layout, str(recipe))
    for attempt in range(1, times + 1):
        run.wait_for_step(10 * attempt, attempt)
        preempt(run)
    status = run.complete()
    assert run.endings() == ["preempted"] * times + ["completed"]
    assert runs.resumed_at_the_next_step(status)
    assert run.digest() == undisturbed(run.path, tmp_path / "alone")
    _assert_accounting_agrees(cluster, run, times)
    _assert_every_gpu_is_recorded(run, nodes, times + 1)


# Its argument is the number of steps.
_SCRIPT_WITH_SECRET = """
import os
import sys
import time
import torch
import clustertrain as ct

print("a secret of", len(os.environ["SECRET"]))
with ct.session() as session:
    model = session.parallelize(torch.nn.Linear(8, 8))
    for step in session.steps(total=int(sys.argv[1]), state={"model": model}, checkpoint_every=100_000):
        time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def requeued(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A completed, shared run with a secret, requeued by hand after its script was edited."""
    script = tmp_path_factory.mktemp("requeued") / "train.py"
    script.write_text(_SCRIPT_WITH_SECRET)
    run = runs.submit(env, "--share", "--env", "SECRET=s3cret-canary", *TWO_NODES, str(script), "60")
    try:
        run.wait_for_step(5)
        script.write_text("raise SystemExit('edited after it was submitted')")
        run.call("requeue", run.id)
        run.complete()
        yield run
    finally:
        run.cancel_if_active()


def test_secret_of_shared_run_is_in_no_readable_file(requeued: Run) -> None:
    for attempt in (1, 2):
        assert "a secret of 13" in RunDir(requeued.path).attempt(attempt).rank_log(1).read_text()
    for path in requeued.path.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o077:
            assert b"s3cret-canary" not in path.read_bytes(), path


def test_manual_requeue_keeps_submit_options(requeued: Run) -> None:
    status = requeued.status()
    assert requeued.endings() == ["preempted", "completed"]
    assert runs.resumed_at_the_next_step(status)
    assert (status["step"], status["total_steps"]) == (60, 60)


def _assert_accounting_agrees(cluster: Any, run: Run, times: int) -> None:
    """Assert one row of `sacct -D` per attempt. The jobs requeue themselves, so a preempted start is REQUEUED."""
    rows = cluster.run("sacct", "-D", "-X", "-n", "-P", "-j", run.job_id, "-o", "State").stdout.split()
    assert rows == ["REQUEUED"] * times + ["COMPLETED"]


def _assert_every_gpu_is_recorded(run: Run, nodes: int, attempts: int) -> None:
    report = json.loads(run.call("telemetry", run.id, "--json").stdout)
    allocated = [attempt["nodes"] for attempt in run.status()["attempts"]]
    assert [len(names) for names in allocated] == [nodes] * attempts
    gpus_found = [(g["node"], g["index"]) for g in report["gpus"]]
    assert sorted(gpus_found) == [(node, 0) for node in sorted({n for names in allocated for n in names})]
    assert len({g["uuid"] for g in report["gpus"]}) == len(gpus_found)
    assert len(report["attempts"]) == attempts
    assert all(g["utilization"]["mean"] is not None for g in report["gpus"])


# On the cluster the first attempt exceeds its limit of a minute on any machine. A resumed attempt ends quickly.
_PACED_SCRIPT = """
import os
import time
import torch
import clustertrain as ct

first = None
with ct.session() as session:
    model = session.parallelize(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    for step in session.steps(total=250, state=state, checkpoint_every=1000):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        first = step if first is None else first
        if first == 0 and "SLURM_JOB_ID" in os.environ:
            time.sleep(0.25)
"""


@pytest.fixture(scope="module")
def paced(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that sleeps past its limit of a minute."""
    script = tmp_path_factory.mktemp("paced") / "paced.py"
    script.write_text(_PACED_SCRIPT)
    run = runs.submit(env, *TWO_NODES, "--layout", "fsdp", "--time", "1", str(script))
    yield run
    run.cancel_if_active()


@pytest.mark.usefixtures("paced")  # its minute starts here, so its own test need not wait for it
def test_cancelled_run_stays_cancelled(cluster: Any, submit_run: Callable[..., Run], recipe: Path) -> None:
    cancelled = submit_run(*TWO_NODES, "--layout", "fsdp", str(recipe))
    scancelled = submit_run(*ONE_NODE, str(recipe))
    actions = {
        cancelled: lambda run: run.call("cancel", run.id),
        scancelled: lambda run: cluster.run("scancel", run.job_id),
    }
    runs.at_step(5, actions)
    for run in actions:
        cluster.wait_for(lambda job=run.job_id: not _in_queue(cluster, job), 60, "the job to leave the queue")
        status = run.status()
        assert status["state"] == "cancelled"
        assert run.endings() == ["cancelled"]
        rows = cluster.run("sacct", "-D", "-X", "-n", "-P", "-j", run.job_id, "-o", "State").stdout.splitlines()
        assert len(rows) == 1
        assert rows[0].startswith("CANCELLED")
        assert run.call("wait", run.id, check=False).returncode == 1


def _in_queue(cluster: Any, job: str) -> bool:
    return bool(cluster.run("squeue", "-h", "-j", job, check=False).stdout.strip())


def _processes(run: Run, verb: str) -> list[psutil.Process]:
    """Return the run's processes with the verb, found by their command line and environment."""
    processes = []
    for p in psutil.process_iter(["cmdline"]):
        argv = p.info["cmdline"] or []
        try:
            if argv[1:5] == ["-P", "-m", "clustertrain", verb] and p.environ().get("CLUSTERTRAIN_RUN_DIR") == str(
                run.path
            ):
                processes.append(p)
        except psutil.Error:
            continue
    return processes


def test_signal_to_one_process_stops_all_ranks_at_same_step(
    submit_run: Callable[..., Run], recipe: Path, tmp_path: Path
) -> None:
    run = submit_run(*TWO_NODES, "--layout", "fsdp", str(recipe))
    run.wait_for_step(10)
    _processes(run, "agent")[-1].send_signal(signal.SIGTERM)
    run.wait_for_step(20, attempt=2)
    _processes(run, "batch")[-1].send_signal(signal.SIGUSR1)
    status = run.complete()
    # The sender and the reason are unknown, so no cause is invented.
    assert run.endings() == ["signal", "signal", "completed"]
    assert runs.resumed_at_the_next_step(status)
    assert run.digest() == undisturbed(run.path, tmp_path / "alone")


def test_run_survives_time_limit_bit_exactly(paced: Run, tmp_path: Path) -> None:
    status = paced.complete()
    assert set(paced.endings()) == {"time_limit", "completed"}
    assert runs.resumed_at_the_next_step(status)
    assert paced.digest() == undisturbed(paced.path, tmp_path / "alone")


def test_lost_node_does_not_lose_run(cluster: Any, submit_run: Callable[..., Run], tmp_path: Path) -> None:
    # With periodic checkpoints, because a lost node gives no warning. Exclusive, so that each run loses its own node.
    recipe = str(runs.write_recipe(tmp_path, steps=120, every=10))
    killed, disconnected = (
        submit_run(*TWO_NODES, "--sbatch", "exclusive", "--layout", "fsdp", recipe) for _ in range(2)
    )
    lost: list[str] = []

    def lose(run: Run, break_node: Callable[[str], None]) -> None:
        lost.append(run.status()["attempts"][0]["nodes"][1])
        break_node(lost[-1])

    try:
        runs.at_step(
            15, {killed: lambda r: lose(r, cluster.kill_node), disconnected: lambda r: lose(r, cluster.partition_node)}
        )
        expected = undisturbed(killed.path, tmp_path / "alone")  # while Slurm has not noticed
        for run in (killed, disconnected):
            status = run.complete(timeout_s=400)
            assert status["attempts"][0]["state"] == "node_failure"
            assert status["attempts"][0]["reason"]
            assert run.digest() == expected
    finally:
        for node in lost:
            cluster.heal_node(node)
    assert len(set(lost)) == 2


def test_error_ends_run_at_once(submit_run: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import clustertrain as ct\nwith ct.session() as s:\n    raise ValueError('no such thing')\n")
    run = submit_run("--nodes", "2", "--gpus", "1", str(script))
    status = run.wait_until_final()
    assert (status["state"], run.endings()) == ("failed", ["failed"])
    assert "no such thing" in status["attempts"][0]["reason"]


def test_pending_run_reports_reason_and_can_be_cancelled(
    cluster: Any, submit_run: Callable[..., Run], recipe: Path
) -> None:
    blocker = cluster.run(
        "sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 120"
    ).stdout.strip()
    try:
        run = submit_run(*TWO_NODES, str(recipe))
        status = run.wait_for(lambda s: s["pending_reason"] is not None, "a reason")
        assert status["state"] == "pending"
        assert status["attempts"] == []
        run.call("cancel", run.id)
        run.wait_for(lambda s: s["state"] == "cancelled", "the cancellation")
    finally:
        cluster.run("scancel", blocker)
