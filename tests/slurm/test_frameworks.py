"""Programs of other frameworks on Slurm, over two nodes: preempted, at their time limit, and with a killed rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clustertrain.run import attempts
from clustertrain.run.run_dir import RunDir
from tests.paths import ROOT
from tests.runs import Run

pytestmark = pytest.mark.slurm
PROGRAMS = ROOT / "tests" / "fixtures" / "programs"
STEPS = "1000000"


def submit_program(submit_run: Callable[..., Run], folder: Path, name: str, *options: str) -> Run:
    (folder / name).write_text((PROGRAMS / name).read_text())
    command = (sys.executable, str(folder / name), str(folder / "out"), STEPS)
    return submit_run("--nodes", "2", "--gpus", "1", *options, "--", *command)


def read_steps(run: Run, attempt: int, rank: int) -> list[int]:
    log = run.path / "attempts" / str(attempt) / "logs" / f"rank-{rank}.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith("STEP ")]


@pytest.mark.parametrize(("name", "how"), [("transformers_trainer.py", "preempt"), ("attached_loop.py", "time limit")])
def test_ranks_of_two_nodes_stop_after_one_step_and_resume(
    submit_run: Callable[..., Run], preempt: Callable[[Run], None], tmp_path: Path, name: str, how: str
) -> None:
    limit = ("--time", "2") if how == "time limit" else ()
    run = submit_program(submit_run, tmp_path, name, *limit)
    run.wait_for(lambda _: all(len(read_steps(run, 1, rank)) > 20 for rank in (0, 1)), "steps of both ranks")
    if how == "preempt":
        preempt(run)
    run.wait_for(lambda _: all(read_steps(run, 2, rank) for rank in (0, 1)), "steps of the second attempt")
    stopped = [read_steps(run, 1, rank)[-1] for rank in (0, 1)]
    resumed = [read_steps(run, 2, rank)[0] for rank in (0, 1)]
    assert stopped[0] == stopped[1] == resumed[0] - 1 == resumed[1] - 1
    (first, second) = attempts.load_attempts(RunDir(run.path))
    assert (first.ending, first.committed_step) == ("time_limit" if how == "time limit" else "preempted", stopped[0])
    assert second.restored_step == stopped[0]
    run.call("cancel", run.id)
    run.wait_until_final()


def test_killed_rank_costs_the_steps_since_its_last_checkpoint(submit_run: Callable[..., Run], tmp_path: Path) -> None:
    text = (PROGRAMS / "attached_loop.py").read_text().replace("load=load)", "load=load, every=20)")
    (tmp_path / "attached_loop.py").write_text(text)
    command = (sys.executable, str(tmp_path / "attached_loop.py"), str(tmp_path / "out"), STEPS)
    run = submit_run("--nodes", "2", "--gpus", "1", "--", *command)
    run.wait_for(lambda _: len(read_steps(run, 1, 1)) > 30, "a checkpoint")
    (victim,) = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path / "out") in (p.info["cmdline"] or []) and p.environ().get("RANK") == "1"
    ]
    victim.kill()
    run.wait_for(lambda _: all(read_steps(run, 2, rank) for rank in (0, 1)), "steps of the second attempt")
    first, second = attempts.load_attempts(RunDir(run.path))
    assert first.committed_step == second.restored_step == read_steps(run, 2, 0)[0] - 1
    assert first.committed_step % 20 == 0
    assert read_steps(run, 1, 0)[-1] - first.committed_step <= 21
    run.call("cancel", run.id)
    run.wait_until_final()
