"""How custom scripts can end, and the resulting ending of the run, on the local backend."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import runs
from tests.runs import LOCAL, Run

pytestmark = pytest.mark.ranks
ONE_RANK = ("--nodes", "1", "--gpus", "1")


@pytest.fixture
def submitted(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    clean_env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    submitted_runs: list[Run] = []

    def submit(text: str, *options: str) -> Run:
        script = tmp_path / "script.py"
        script.write_text(text)
        env = {**clean_env, "CLUSTERTRAIN_HOME": str(tmp_path / "home")}
        submitted_runs.append(runs.submit(env, *LOCAL, *options, str(script)))
        return submitted_runs[-1]

    yield submit
    for run in submitted_runs:
        run.cancel_if_active()
        run.wait_until_final()


def find_processes(run: Run, text: str) -> list[psutil.Process]:
    """Return the living processes of the run with ``text`` in their command line."""
    matches = []
    for p in psutil.process_iter():
        try:
            if p.environ().get("CLUSTERTRAIN_RUN_DIR") == str(run.path) and p.status() != psutil.STATUS_ZOMBIE:
                matches += [p] if text in " ".join(p.cmdline()) else []
        except psutil.Error:
            continue
    return matches


SAVES_AND_EXITS_0 = """
import clustertrain  # without it, submit would start a command
import os, pathlib, time

saved = pathlib.Path(os.environ["CLUSTERTRAIN_RUN_DIR"], "saved")
if not saved.exists():
    stop = pathlib.Path(os.environ["CLUSTERTRAIN_RANK_DIR"], "stop")
    saved.with_name("training").touch()
    while not stop.exists():
        time.sleep(0.05)
    saved.touch()
    END
"""


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "os._exit(0)", "raise SystemExit(75)"])
def test_script_that_saves_on_warning_and_exits_0_is_continued(submitted: Callable[..., Run], end: str) -> None:
    run = submitted(SAVES_AND_EXITS_0.replace("END", end), *ONE_RANK)
    run.wait_for(lambda _: (run.path / "training").exists(), "the script's start")
    run.call("requeue", run.id)
    status = run.complete()
    assert run.endings() == ["preempted", "completed"]
    assert "script" in status["attempts"][0]["reason"]


LEAVES_EARLY = """
import clustertrain as ct, os, time

with ct.session() as s:
    for step in s.steps(total=4, state={"done": 0}, checkpoint_every=1):
        if step == 2 and os.environ["CLUSTERTRAIN_ATTEMPT"] == "1":
            while not s.stop_requested:
                time.sleep(0.01)
            END
"""


@pytest.mark.parametrize("end", ["break", "raise SystemExit(75)"])
def test_session_left_early_after_warning_is_continued(submitted: Callable[..., Run], end: str) -> None:
    run = submitted(LEAVES_EARLY.replace("END", end), *ONE_RANK)
    run.wait_for_step(2)
    run.call("requeue", run.id)
    run.complete()
    assert run.endings() == ["preempted", "completed"]
    assert run.status()["attempts"][1]["last_step"] == 4


@pytest.mark.parametrize(
    ("end", "ending", "message"),
    [
        ("os._exit(0)", "failed", "ended with exit code 0 before its script returned (os._exit?)"),
        ("os._exit(3)", "unknown", "ended with exit code 3 without a Python error (os._exit?)"),
        ("raise SystemExit(75)", "unknown", "exit code 75, which requests another attempt"),
    ],
)
def test_exit_code_without_warning_is_named(submitted: Callable[..., Run], end: str, ending: str, message: str) -> None:
    run = submitted(f"import clustertrain, os\n{end}\n", *ONE_RANK, "--max-requeues", "0")
    (attempt,) = run.wait_until_final()["attempts"]
    assert (attempt["state"], message in attempt["reason"]) == (ending, True), attempt["reason"]


def test_os_exit_after_last_step_completes_run(submitted: Callable[..., Run]) -> None:
    steps = "import clustertrain as ct, os\nwith ct.session() as s:\n    for _ in s.steps(total=2): pass\n"
    run = submitted(f"{steps}os._exit(0)\n", *ONE_RANK)
    run.complete()
    assert run.endings() == ["completed"]


WAITS_ONCE = """
import clustertrain  # without it, submit would start a command
import os, time
if os.environ["CLUSTERTRAIN_ATTEMPT"] == "1":
    print("waiting", flush=True)
    time.sleep(3600)
"""


def test_killed_torchrun_is_named_as_cause(submitted: Callable[..., Run]) -> None:
    run = submitted(WAITS_ONCE, *ONE_RANK)
    log = run.path / "attempts" / "1" / "logs" / "rank-0.log"
    run.wait_for(lambda _: log.exists() and "waiting" in log.read_text(), "the script's start")
    (torchrun,) = find_processes(run, "torch.distributed.run")
    torchrun.kill()
    status = run.complete()
    assert "was killed by SIGKILL" in status["attempts"][0]["reason"]
    assert "torchrun on" in status["attempts"][0]["reason"]


REDUCES = """
import os
import time
import torch
import torch.distributed as dist
import clustertrain as ct

with ct.session() as s:
    for step in s.steps(total=10**9 if os.environ["CLUSTERTRAIN_ATTEMPT"] == "1" else 2):
        dist.all_reduce(torch.zeros(1, device=s.device))
        time.sleep(0.02)
"""

# Rank 0 waits for rank 1 before they are connected, so that no broken connection reports the end of rank 1.
DELAYS_RANK_1 = """
import os, pathlib, time
if os.environ["CLUSTERTRAIN_ATTEMPT"] == "1" and os.environ["RANK"] == "1":
    pathlib.Path(os.environ["CLUSTERTRAIN_RUN_DIR"], "late").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("delayed", [False, True])
def test_killed_agent_ends_its_ranks_without_blaming_node(submitted: Callable[..., Run], delayed: bool) -> None:
    run = submitted((DELAYS_RANK_1 if delayed else "") + REDUCES, "--nodes", "2", "--gpus", "1")
    if delayed:
        run.wait_for(lambda _: (run.path / "late").exists(), "rank 1's start")
    else:
        run.wait_for_step(2)
    agents = [
        p for p in find_processes(run, "clustertrain agent") if p.cmdline()[1:] == ["-P", "-m", "clustertrain", "agent"]
    ]
    (agent,) = [p for p in agents if p.environ()["CLUSTERTRAIN_NODE_RANK"] == "1"]
    node = agent.environ()["CLUSTERTRAIN_NODE"]
    orphans = agent.children(recursive=True)
    agent.kill()
    _, remaining = psutil.wait_procs(orphans, timeout=30.0)
    assert {p.status() for p in remaining} <= {psutil.STATUS_ZOMBIE}
    status = run.complete()
    first = status["attempts"][0]
    assert first["state"] == "unknown", first
    assert f"the agent on {node} was killed" in first["reason"]
    assert first["requeued"] == "requeue"
    assert not list(Path(tempfile.gettempdir()).glob(f"clustertrain-{run.id}-*"))


STOPS_RANK_1 = """
import os, signal
import torch
import torch.distributed as dist
import clustertrain as ct

with ct.session(timeout_s=5.0) as s:
    for step in s.steps(total=4):
        if step == 2 and s.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.zeros(1, device=s.device))
"""


def test_hang_names_the_stopped_rank(submitted: Callable[..., Run]) -> None:
    run = submitted(STOPS_RANK_1, "--nodes", "1", "--gpus", "2", "--max-requeues", "0")
    (attempt,) = run.wait_until_final()["attempts"]
    assert attempt["state"] == "hang"
    assert "rank 0 waited in a collective until it timed out, at step 3; rank 1 did not reach it" in attempt["reason"]
    assert "its process stopped (SIGSTOP" in attempt["reason"]
