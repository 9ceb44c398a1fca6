"""The local backend with real agents, torchrun and gloo ranks: the same endings as on a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from clustertrain import clock, fsio
from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from clustertrain.run.usage.goodput import TIME_CATEGORIES
from tests import runs
from tests.ranks.rank_pool import undisturbed
from tests.runs import DEVICE, LOCAL, Run

pytestmark = pytest.mark.ranks
# Each rank and each node's torchrun spend seconds importing torch: a test uses as few of them as possible.
TWO_NODES = ("--nodes", "2", "--gpus", "1", "--layout", "fsdp")
TWO_RANKS = ("--nodes", "1", "--gpus", "2", "--layout", "fsdp")
ONE_RANK = ("--nodes", "1", "--gpus", "1")


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    clean_env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    return {**clean_env, "CLUSTERTRAIN_HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture
def submitted(env: dict[str, str]) -> Iterator[Callable[..., Run]]:
    submitted_runs: list[Run] = []

    def submit(*argv: str) -> Run:
        submitted_runs.append(runs.submit(env, *LOCAL, *argv))
        return submitted_runs[-1]

    yield submit
    for run in submitted_runs:
        run.cancel_if_active()
        run.wait_until_final()


def living_processes(run: Run) -> list[psutil.Process]:
    """Return all living processes of the run."""
    processes = []
    for p in psutil.process_iter():
        try:
            if p.environ().get("CLUSTERTRAIN_RUN_DIR") == str(run.path) and p.status() != psutil.STATUS_ZOMBIE:
                processes.append(p)
        except psutil.Error:
            continue
    return processes


def rank_processes(run: Run) -> list[psutil.Process]:
    return [p for p in living_processes(run) if p.cmdline()[1:] == ["-u", "-P", "-m", "clustertrain", "train"]]


def test_group_can_read_all_of_a_shared_run(submitted: Callable[..., Run], tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=4)
    before = os.umask(0o077)
    try:
        run = submitted(*ONE_RANK, "--share", str(recipe))
    finally:
        os.umask(before)
    run.complete()
    for path in (run.path, *run.path.rglob("*")):
        needed = 0o050 if path.is_dir() else 0o040
        assert path.stat().st_mode & needed == needed, path
        assert not path.stat().st_mode & 0o027, path


def test_run_preempted_twice_matches_undisturbed_run(submitted: Callable[..., Run], tmp_path: Path) -> None:
    more = "[preemption_test]\npreempt_at_steps = [20, 50]\n"
    run = submitted(*TWO_RANKS, str(runs.write_recipe(tmp_path, steps=100, more=more, paced=False)))
    status = run.complete()
    assert run.endings() == ["preempted", "preempted", "completed"]
    assert runs.resumed_at_the_next_step(status)
    assert run.digest() == undisturbed(run.path, tmp_path / "undisturbed")
    prediction = run.status()["prediction"]
    # Medians over the steps of all three attempts, except their first steps; two ranks share the tokens of a step.
    assert prediction["attempts"] == [1, 2, 3] and 50 < prediction["steps"] < 100
    rows = [r["step_s"] for r in metrics.load_rows(RunDir(run.path))]
    assert min(rows) <= prediction["step_s"]["measured"] <= max(rows)
    tokens_per_step = (fsio.read_json(run.path / "plan.json") or {})["batch"]["tokens_per_step"]
    tokens_per_rank_and_step = prediction["tokens_per_s_per_gpu"]["measured"] * prediction["step_s"]["measured"]
    assert tokens_per_rank_and_step == pytest.approx(tokens_per_step / 2, rel=0.05)
    assert prediction["step_s"]["predicted"] is None
    peak = prediction["peak_gib"]
    assert peak == {"predicted": None, "measured": None} if DEVICE == "cpu" else min(peak.values()) > 1
    goodput = status["goodput"]
    assert sum(goodput[part] for part in TIME_CATEGORIES) == pytest.approx(goodput["wall_s"])


def test_run_that_ignores_warning_is_killed_and_restarted(submitted: Callable[..., Run], tmp_path: Path) -> None:
    # Only the first attempt hangs, where it cannot notice the stop.
    script = tmp_path / "ignores_stop.py"
    script.write_text(
        "import clustertrain as ct, os, time\n"
        "with ct.session() as s:\n"
        "    for step in s.steps(total=4, state={'done': 0}, checkpoint_every=1):\n"
        "        if step == 2 and os.environ['CLUSTERTRAIN_ATTEMPT'] == '1':\n"
        "            time.sleep(3600)\n"
    )
    preemption = ("--set", "preemption_test.preempt_at_steps=[1, 1000]", "--set", "preemption_test.grace_s=3")
    run = submitted(*ONE_RANK, *preemption, str(script))
    status = run.complete()
    assert run.endings() == ["preempted", "completed"]
    assert status["attempts"][0]["requeued"] == "slurm"
    # The supervisor writes it after the last line of the run.
    message = "the job ended before it was preempted at 1000"
    assert clock.wait_until(lambda: message in (run.path / "job.log").read_text(), 30)


def test_warning_in_last_step_is_reported_as_too_late(submitted: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "slow_last_step.py"
    script.write_text(
        "import clustertrain as ct, time\n"
        "with ct.session() as s:\n"
        "    for step in s.steps(total=2, state={'done': 0}):\n"
        "        time.sleep(step * 2)\n"
    )
    run = submitted(*ONE_RANK, "--set", "preemption_test.preempt_at_steps=[1]", str(script))
    run.complete()
    assert run.endings() == ["completed"]
    message = "the job ended before it was preempted at 1"
    assert clock.wait_until(lambda: message in (run.path / "job.log").read_text(), 30)


def test_cancelled_run_continues_only_by_manual_requeue(submitted: Callable[..., Run], tmp_path: Path) -> None:
    run = submitted(*ONE_RANK, str(runs.write_recipe(tmp_path)))
    run.wait_for_step(10)
    ranks = rank_processes(run)
    for rank in ranks:
        rank.suspend()  # so that the run cannot complete before the command reaches it
    run.call("cancel", run.id)
    assert clock.wait_until((run.path / "attempts" / "1" / "stop.json").exists, 60)
    for rank in ranks:
        rank.resume()
    assert run.wait_until_final()["state"] == "cancelled"
    assert clock.wait_until(lambda: not living_processes(run), 60)
    assert run.endings() == ["cancelled"]
    assert run.call("wait", run.id, check=False).returncode == 1
    run.call("requeue", run.id)
    run.complete()
    assert run.endings() == ["cancelled", "completed"]
    assert run.digest() == undisturbed(run.path, tmp_path / "undisturbed")


def test_killed_supervisor_ends_run_and_requeue_continues_it(submitted: Callable[..., Run], tmp_path: Path) -> None:
    run = submitted(*TWO_NODES, str(runs.write_recipe(tmp_path, steps=100_000, every=10)))
    run.wait_for_step(15)
    supervisor = next(
        p
        for p in psutil.process_iter(["cmdline"])
        if "clustertrain.scheduler.local_supervisor" in (p.info["cmdline"] or [])
        and any(c.pid in {b.pid for b in living_processes(run)} for c in p.children())
    )
    supervisor.kill()
    assert clock.wait_until(lambda: not living_processes(run), 90), [p.cmdline() for p in living_processes(run)]
    status = run.wait_until_final()
    assert status["state"] == "failed"
    assert run.endings() == ["node_failure"]
    run.call("requeue", run.id)
    run.wait_for_step(status["attempts"][0]["committed_step"] + 1, attempt=2)
    assert run.status()["attempts"][1]["first_step"] == status["attempts"][0]["committed_step"] + 1


def test_killed_rank_is_not_a_success(submitted: Callable[..., Run], tmp_path: Path) -> None:
    run = submitted(*TWO_RANKS, str(runs.write_recipe(tmp_path, every=10)))
    run.wait_for_step(15)
    rank_processes(run)[-1].send_signal(signal.SIGKILL)
    status = run.complete()
    assert run.endings()[0] in ("unknown", "communication")
    assert status["attempts"][0]["reason"]
    assert run.digest() == undisturbed(run.path, tmp_path / "undisturbed")


def test_error_is_reported_and_not_retried(submitted: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import clustertrain as ct\nwith ct.session() as s:\n    raise ValueError('no such thing')\n")
    run = submitted(*TWO_RANKS, str(script))
    status = run.wait_until_final()
    assert (status["state"], run.endings()) == ("failed", ["failed"])
    assert "no such thing" in status["attempts"][0]["reason"]
    assert "ValueError" in run.call("logs", run.id, "--rank", "1").stdout


def test_crashed_rank_is_reported_with_its_log(submitted: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(
        "import os, signal\nimport torch.distributed as dist\nimport clustertrain as ct\nwith ct.session():\n"
        "    if dist.get_rank() == 1:\n        os.kill(os.getpid(), signal.SIGSEGV)\n    dist.barrier()\n"
    )
    run = submitted(*TWO_RANKS, "--max-requeues", "0", str(script))
    status = run.wait_until_final()
    assert (status["state"], run.endings()) == ("failed", ["unknown"])
    assert "SIGSEGV" in status["attempts"][0]["reason"] and "logs/rank-1.log" in status["attempts"][0]["reason"]
    log = run.call("logs", run.id, "--rank", "1").stdout
    assert "Fatal Python error: Segmentation fault" in log and "crashing.py" in log


def test_run_continues_after_ranks_overrun_time_limit(submitted: Callable[..., Run], tmp_path: Path) -> None:
    # The first attempt does not notice the limit. It is killed while a requeue is still accepted. On a busy machine, a
    # later attempt may be slow to start and reach the limit as well.
    script = tmp_path / "late.py"
    script.write_text(
        "import clustertrain as ct, os, time\n"
        "with ct.session() as s:\n"
        "    for step in s.steps(total=4, state={'done': 0}, checkpoint_every=1):\n"
        "        if step == 2 and os.environ['CLUSTERTRAIN_ATTEMPT'] == '1':\n"
        "            time.sleep(3600)\n"
    )
    run = submitted(*ONE_RANK, "--time", "0:30", str(script))
    run.complete()
    *earlier, last = run.endings()
    assert set(earlier) == {"time_limit"} and last == "completed"
    assert run.status()["attempts"][0]["committed_step"] == 2


def test_manual_requeue_changes_time_limit(submitted: Callable[..., Run], tmp_path: Path) -> None:
    run = submitted(*ONE_RANK, "--time", "60", str(runs.write_recipe(tmp_path, steps=100_000)))
    run.wait_for_step(5)
    run.call("requeue", run.id, "--time", "120")
    run.wait_for_step(6, attempt=2)
    assert run.endings() == ["preempted", "running"]
    deadline = fsio.read_json(run.path / "attempts" / "2" / "deadline.json")
    assert deadline["end_time"] - run.status()["attempts"][1]["start_unix_s"] == pytest.approx(7200, abs=10)


def test_max_requeues_0_ends_run_at_first_preemption(submitted: Callable[..., Run], tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=1000, more="[preemption_test]\npreempt_at_steps = [5]\n")
    run = submitted(*ONE_RANK, "--max-requeues", "0", str(recipe))
    status = run.wait_until_final()
    assert (status["state"], run.endings()) == ("failed", ["preempted"])
    assert "max-requeues" in status["attempts"][0]["stopped"]


def test_closing_the_terminal_does_not_end_run(env: dict[str, str], tmp_path: Path) -> None:
    """`submit` runs in a separate session, as in a terminal, which then gets SIGHUP."""
    recipe = runs.write_recipe(tmp_path)
    argv = [*runs.CLI, "submit", "--wait", *LOCAL, *ONE_RANK, str(recipe)]
    with subprocess.Popen(argv, env=env, start_new_session=True, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        run_id = shell.stdout.readline().split()[1]
        os.killpg(shell.pid, signal.SIGHUP)
    run = Run(env, {"run": run_id, "job_id": "", "run_dir": Path(env["CLUSTERTRAIN_HOME"]) / "runs" / run_id})
    run.complete()
    assert run.digest() == undisturbed(run.path, tmp_path / "undisturbed")


def test_wait_for_sweep_that_runs_one_at_a_time(env: dict[str, str], tmp_path: Path) -> None:
    # No session: a rank without torch costs next to nothing. `a` is held until the others have been checked.
    script = tmp_path / "who.py"
    script.write_text(
        "import os, pathlib, time\n"
        "print('I am', os.environ['WHO'])\n"
        "while os.environ['WHO'] == 'a' and not pathlib.Path(os.environ['GO']).exists():\n"
        "    time.sleep(0.05)\n"
    )
    args = (*LOCAL, "--env", f"GO={tmp_path / 'go'}", "--grid", "env.WHO=a,b,c")
    submission = json.loads(runs.call(env, "sweep", "--json", *args, str(script)).stdout)
    a, b, c = (Run(env, row) for row in submission["runs"])
    try:
        a.wait_for(lambda s: s["state"] == "running", "its turn")
        assert (b.status()["pending_reason"], c.status()["pending_reason"]) == (
            f"waits for {a.job_id}", f"waits for {b.job_id}"
        )  # fmt: skip
        b.call("cancel", b.id)
        b.wait_until_final()
        (tmp_path / "go").touch()
        c.complete()
    finally:
        runs.call(env, "cancel", submission["sweep"], check=False)
    result = runs.call(env, "wait", submission["sweep"], check=False)
    endings = {f"{a.id}: completed", f"{b.id}: cancelled", f"{c.id}: completed"}
    assert (result.returncode, set(result.stderr.splitlines())) == (1, endings)
    assert "I am c\n" in c.call("logs", c.id).stdout


def test_batch_and_agents_end_when_run_is_taken_over(submitted: Callable[..., Run], tmp_path: Path) -> None:
    run = submitted(*ONE_RANK, str(runs.write_recipe(tmp_path, steps=100_000, every=10)))
    run.wait_for_step(15)
    (run.path / "attempts" / "2").mkdir()
    assert clock.wait_until(lambda: not living_processes(run), 120), [p.cmdline() for p in living_processes(run)]
    reason = "taken over by attempt 2"
    result = json.loads((run.path / "attempts" / "1" / "results" / "local0.json").read_text())
    assert (result["ending"], result["reason"], result["exit_code"]) == ("stopped", reason, 93)
    assert f"attempt 1 decides nothing: {reason}" in (run.path / "job.log").read_text()
    job = Path(run.env["CLUSTERTRAIN_HOME"]) / "local" / run.job_id.removeprefix("local-") / "job.json"
    assert clock.wait_until(lambda: [s["exit_code"] for s in json.loads(job.read_text())["starts"]] == [93], 60)
