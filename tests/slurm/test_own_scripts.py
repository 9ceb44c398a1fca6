"""The endings of user scripts, and of a run whose agent is killed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.runs import Run

pytestmark = pytest.mark.slurm

SCRIPT_SAVES_ON_SIGNAL = """
import clustertrain  # without it, submit would start a command
import os, pathlib, signal, sys, time

saved = pathlib.Path(os.environ["CLUSTERTRAIN_RUN_DIR"], "saved-" + os.environ["RANK"])
if not saved.exists():
    def save(number, frame):
        saved.touch()
        sys.exit(0)
    signal.signal(signal.SIGUSR2, save)
    saved.with_name("training-" + os.environ["RANK"]).touch()
    time.sleep(600)
"""

COMMAND_SAVES_ON_SIGNAL = """
import os, pathlib, signal, sys, time

folder, rank = pathlib.Path(os.environ["CLUSTERTRAIN_RUN_DIR"]), os.environ["RANK"]
if not (folder / f"saved-{rank}").exists():
    def save(number, frame):
        with (folder / f"saved-{rank}").open("a") as file:
            file.write(signal.Signals(number).name)
        time.sleep(1)  # a second signal would arrive by now
        sys.exit(0)
    signal.signal(signal.Signals["SIG" + os.environ["CLUSTERTRAIN_STOP_SIGNAL"]], save)
    (folder / f"training-{rank}").touch()
    time.sleep(600)
"""

SCRIPT_ALL_REDUCES = """
import os
import time
import torch
import torch.distributed as dist
import clustertrain as ct

with ct.session() as s:
    for step in s.steps(total=10**9 if os.environ["CLUSTERTRAIN_ATTEMPT"] == "1" else 2):
        dist.all_reduce(torch.zeros(1))
        time.sleep(0.02)
"""

# Rank 0 waits for rank 1 before they are connected, so no broken connection shows that rank 1 is gone.
RANK_1_ARRIVES_LATE = """
import os, pathlib, time
if os.environ["CLUSTERTRAIN_ATTEMPT"] == "1" and os.environ["RANK"] == "1":
    pathlib.Path(os.environ["CLUSTERTRAIN_RUN_DIR"], "late").touch()
    time.sleep(600)
"""


def test_script_that_exits_0_on_slurm_signal_is_continued(submit_run: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SCRIPT_SAVES_ON_SIGNAL)
    run = submit_run("--nodes", "2", "--gpus", "1", str(script))
    run.wait_for(lambda _: len(list(run.path.glob("training-*"))) == 2, "the start of both ranks")
    run.call("requeue", run.id)
    run.complete()
    assert run.endings() == ["preempted", "completed"]


@pytest.mark.parametrize(
    ("how", "stop_signal"),
    [("requeue", "TERM"), ("preempt", "TERM"), ("time limit", "TERM"), ("preempt", "USR1"), ("requeue", "USR2")],
)
def test_command_gets_one_signal_and_comes_back(
    submit_run: Callable[..., Run], preempt: Callable[[Run], None], tmp_path: Path, how: str, stop_signal: str
) -> None:
    (tmp_path / "program.py").write_text(COMMAND_SAVES_ON_SIGNAL)
    options = (*(("--time", "2") if how == "time limit" else ()), "--stop-signal", stop_signal)
    run = submit_run("--nodes", "2", "--gpus", "1", *options, "--", sys.executable, str(tmp_path / "program.py"))
    run.wait_for(lambda _: len(list(run.path.glob("training-*"))) == 2, "the start of both ranks")
    if how == "requeue":
        run.call("requeue", run.id)
    elif how == "preempt":
        preempt(run)
    run.complete()
    assert run.endings() == ["time_limit" if how == "time limit" else "preempted", "completed"]
    assert [(run.path / f"saved-{rank}").read_text() for rank in (0, 1)] == [f"SIG{stop_signal}"] * 2


@pytest.mark.usefixtures("cgroup_tracking")
def test_command_gets_the_signal_that_slurm_sends_to_agents_alone(
    submit_run: Callable[..., Run], preempt: Callable[[Run], None], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(COMMAND_SAVES_ON_SIGNAL)
    run = submit_run("--nodes", "2", "--gpus", "1", "--", sys.executable, str(tmp_path / "program.py"))
    run.wait_for(lambda _: len(list(run.path.glob("training-*"))) == 2, "the start of both ranks")
    preempt(run)
    run.complete()
    assert run.endings() == ["preempted", "completed"]
    assert [(run.path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM"] * 2


@pytest.mark.parametrize("late", [False, True])
def test_killed_agent_ends_ranks_without_blaming_node(
    submit_run: Callable[..., Run], tmp_path: Path, late: bool
) -> None:
    script = tmp_path / "meets.py"
    script.write_text((RANK_1_ARRIVES_LATE if late else "") + SCRIPT_ALL_REDUCES)
    run = submit_run("--nodes", "2", "--gpus", "1", str(script))
    if late:
        run.wait_for(lambda _: (run.path / "late").exists(), "the start of rank 1")
    else:
        run.wait_for_step(2)
    agents = [
        p
        for p in psutil.process_iter(["cmdline"])
        if (p.info["cmdline"] or [])[1:] == ["-P", "-m", "clustertrain", "agent"]
    ]
    agent = [p for p in agents if p.environ().get("CLUSTERTRAIN_RUN_DIR") == str(run.path)][-1]
    node = agent.environ()["SLURMD_NODENAME"]
    descendants = agent.children(recursive=True)
    agent.kill()
    _, alive = psutil.wait_procs(descendants, timeout=30.0)
    assert not alive
    status = run.complete()
    first = status["attempts"][0]
    assert (first["state"], first["requeued"]) == ("unknown", "requeue"), first
    assert first["reason"] == f"the agent on {node} was killed by SIGKILL, and its ranks with it"
    assert not list(Path("/tmp").glob(f"clustertrain-{run.id}-*"))
