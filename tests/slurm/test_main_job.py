"""The main job on the real cluster: preempted, out of time, cancelled, robbed of a node; the same bits at the end."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import runs
from tests.nvml_stub.build import build as build_nvml_stub
from tests.runs import Run

pytestmark = pytest.mark.slurm
ALL = ("--nodes", "4", "--gpus", "2")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_script.py"
# For what does not depend on the number of ranks; each of them costs seconds of importing torch on two cores.
HALF = ("--nodes", "2", "--gpus", "1", "--cpus-per-gpu", "1")


@pytest.fixture(scope="module")
def env(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a user at the testbed, with a stand-in for the GPUs' driver."""
    folder = tmp_path_factory.mktemp("slurm")
    build_nvml_stub(folder / "nvml")
    return {
        **cluster.env,
        "CLUSTERTRAIN_HOME": str(folder / "home"),
        "LD_LIBRARY_PATH": str(folder / "nvml"),
        "NVML_STUB_DEVICES": "8",
    }


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def reference(env: dict[str, str], recipe: Path) -> Callable[..., str]:
    """The digest of the run that nothing ever happened to, by shape and layout."""
    known: dict[tuple[str, ...], str] = {}

    def digest(*shape: str) -> str:
        if shape not in known:
            run = runs.submit(env, *shape, str(recipe))
            run.complete()
            assert run.endings() == ["completed"]
            known[shape] = run.digest()
        return known[shape]

    return digest


@pytest.fixture
def submitted(env: dict[str, str]) -> Iterator[Callable[..., Run]]:
    """Submits, and cancels what a failing test leaves behind."""
    made: list[Run] = []

    def submit(*argv: str) -> Run:
        made.append(runs.submit(env, *argv))
        return made[-1]

    yield submit
    for run in made:
        run.call("cancel", run.id, check=False)


def preempt(cluster: Any, run: Run) -> None:
    """A job in the high partition takes all nodes for a moment."""
    before = len(run.status()["attempts"])
    job = cluster.run("sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    run.wait_for(lambda s: s["attempts"][before - 1]["end"] is not None, "the preemption")
    assert str(job.stdout).strip().isdigit()


@pytest.mark.parametrize(("layout", "times"), [("ddp", 1), ("fsdp", 2)])
def test_a_preempted_run_resumes_and_ends_with_the_same_bits(
    cluster: Any, submitted: Callable[..., Run], recipe: Path, reference: Callable[..., str], layout: str, times: int
) -> None:
    run = submitted(*ALL, "--layout", layout, str(recipe))
    for attempt in range(1, times + 1):
        run.wait_for_step(15 * attempt, attempt)
        preempt(cluster, run)
    status = run.complete()
    assert run.endings() == ["preempted"] * times + ["completed"]
    assert runs.resumed_where_they_stopped(status)
    assert run.digest() == reference(*ALL, "--layout", layout)
    _accounting_agrees(cluster, run, times)
    _every_gpu_is_there(run, times + 1)


def _accounting_agrees(cluster: Any, run: Run, times: int) -> None:
    """One row of `sacct -D` for each attempt. Ours requeue themselves, so Slurm calls a preempted start REQUEUED."""
    rows = cluster.run("sacct", "-D", "-X", "-n", "-P", "-j", run.job_id, "-o", "State").stdout.split()
    assert rows == ["REQUEUED"] * times + ["COMPLETED"]


def _every_gpu_is_there(run: Run, attempts: int) -> None:
    report = json.loads(run.call("telemetry", run.id, "--json").stdout)
    found = [(g["node"], g["index"]) for g in report["gpus"]]
    assert sorted(found) == [(f"node0{n}", i) for n in (1, 2, 3, 4) for i in (0, 1)]
    assert len({g["uuid"] for g in report["gpus"]}) == 8
    assert len(report["attempts"]) == attempts
    assert all(g["utilization"]["mean"] is not None for g in report["gpus"])


def test_the_users_signal_at_preemption_counts_as_the_warning(
    cluster: Any, submitted: Callable[..., Run], recipe: Path, reference: Callable[..., str]
) -> None:
    """With preempt_send_user_signal Slurm announces a preemption with the signal of `--signal`, and SIGTERM comes only
    when the grace time is over."""
    cluster.up("--preempt-user-signal")
    try:
        # The limit is near enough for the same signal to mean that.
        run = submitted(*HALF, "--layout", "fsdp", "--time", "2", str(recipe))
        run.wait_for_step(10)
        preempt(cluster, run)
        status = run.complete()
    finally:
        cluster.up()
    assert run.endings()[0] == "preempted"
    assert runs.resumed_where_they_stopped(status)
    assert run.digest() == reference(*HALF, "--layout", "fsdp")


def test_a_time_limit_is_survived_and_ends_with_the_same_bits(submitted: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "paced.py"
    script.write_text(_PACED_SCRIPT)
    run = submitted(*HALF, "--layout", "fsdp", "--time", "1", str(script), "0.25")
    status = run.complete()
    assert set(run.endings()) == {"time_limit", "completed"}
    assert runs.resumed_where_they_stopped(status)
    never_interrupted = submitted(*HALF, "--layout", "fsdp", str(script), "0")
    never_interrupted.complete()
    assert never_interrupted.endings() == ["completed"]
    assert run.digest() == never_interrupted.digest()


# With 0.25 s a step the run outlasts its limit of a minute on any machine.
_PACED_SCRIPT = """
import sys
import time
import torch
import clustertrain as ct

with ct.session() as session:
    model = session.parallelize(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    for step in session.steps(total=160, state=state, checkpoint_every=1000):
        began = time.monotonic()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(max(0.0, float(sys.argv[1]) - (time.monotonic() - began)))
"""


@pytest.mark.parametrize("how", ["cancel", "scancel"])
def test_a_cancelled_run_stays_cancelled(cluster: Any, submitted: Callable[..., Run], recipe: Path, how: str) -> None:
    run = submitted(*HALF, "--layout", "fsdp", str(recipe))
    run.wait_for_step(5)
    if how == "cancel":
        run.call("cancel", run.id)
    else:
        cluster.run("scancel", run.job_id)

    def over() -> bool:
        return (
            not cluster.run("squeue", "-h", "-t", "all", "-j", run.job_id, "-o", "%T", check=False).stdout.strip()
            or cluster.run("squeue", "-h", "-j", run.job_id, check=False).stdout.strip() == ""
        )

    cluster.wait_for(over, 60, "the job to leave the queue")
    status = run.status()
    assert status["state"] == "cancelled"
    assert run.endings() == ["cancelled"]
    rows = cluster.run("sacct", "-D", "-X", "-n", "-P", "-j", run.job_id, "-o", "State").stdout.splitlines()
    assert len(rows) == 1
    assert rows[0].startswith("CANCELLED")
    assert run.call("wait", run.id, check=False).returncode == 1


@pytest.mark.parametrize("loss", ["kill_node", "partition_node"])
def test_a_lost_node_does_not_lose_the_run(
    cluster: Any,
    submitted: Callable[..., Run],
    env: dict[str, str],
    tmp_path: Path,
    reference: Callable[..., str],
    loss: str,
) -> None:
    # With checkpoints on the way: a lost node gives no warning.
    recipe = runs.write_recipe(tmp_path, every=10)
    run = submitted(*HALF, "--layout", "fsdp", str(recipe))
    run.wait_for_step(15)
    lost = run.status()["attempts"][0]["nodes"][1]
    getattr(cluster, loss)(lost)
    try:
        status = run.complete(timeout_s=400)
    finally:
        cluster.heal_node(lost)
    assert status["attempts"][0]["state"] == "node_failure"
    assert status["attempts"][0]["reason"]
    assert run.digest() == reference(*HALF, "--layout", "fsdp")


def _processes(run: Run, verb: str) -> list[psutil.Process]:
    """The run's processes of that verb, found by their command line and environment."""
    found = []
    for p in psutil.process_iter(["cmdline"]):
        words = p.info["cmdline"] or []
        try:
            if words[1:4] == ["-m", "clustertrain", verb] and p.environ().get("CLUSTERTRAIN_RUN_DIR") == str(run.path):
                found.append(p)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(("verb", "number"), [("agent", signal.SIGTERM), ("batch", signal.SIGUSR1)])
def test_a_signal_to_one_process_alone_stops_all_ranks_at_one_step(
    submitted: Callable[..., Run], recipe: Path, reference: Callable[..., str], verb: str, number: int
) -> None:
    run = submitted(*HALF, "--layout", "fsdp", str(recipe))
    run.wait_for_step(10)
    _processes(run, verb)[-1].send_signal(number)
    status = run.complete()
    # Nobody knows who sent it and why, and no cause is made up.
    assert run.endings() == ["unknown", "completed"]
    assert runs.resumed_where_they_stopped(status)
    assert run.digest() == reference(*HALF, "--layout", "fsdp")


def test_an_error_of_the_users_ends_the_run_at_once(submitted: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import clustertrain as ct\nwith ct.session() as s:\n    raise ValueError('no such thing')\n")
    run = submitted("--nodes", "2", "--gpus", "1", str(script))
    status = run.wait_until_final()
    assert (status["state"], run.endings()) == ("failed", ["user_error"])
    assert "no such thing" in status["attempts"][0]["reason"]


def test_requeue_by_hand_starts_again_what_was_submitted(submitted: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EXAMPLE.read_text())
    run = submitted(*HALF, str(script), "--steps", "1500", "--checkpoint-every", "100000")
    run.wait_for_step(10)
    script.write_text("raise SystemExit('edited after it was submitted')")
    run.call("requeue", run.id)
    status = run.complete()
    assert run.endings() == ["preempted", "completed"]
    assert runs.resumed_where_they_stopped(status)
    assert (status["step"], status["total_steps"]) == (1500, 1500)


def test_a_pending_run_says_why_and_can_be_cancelled(cluster: Any, submitted: Callable[..., Run], recipe: Path) -> None:
    blocker = cluster.run(
        "sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 120"
    ).stdout.strip()
    try:
        run = submitted(*HALF, str(recipe))
        status = run.wait_for(lambda s: s["pending_reason"] is not None, "a reason")
        assert status["state"] == "pending"
        assert status["attempts"] == []
        run.call("cancel", run.id)
        run.wait_for(lambda s: s["state"] == "cancelled", "the cancellation")
    finally:
        cluster.run("scancel", blocker)
