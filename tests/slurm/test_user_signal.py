"""With preempt_send_user_signal, Slurm announces a preemption with the signal of `--signal`. SIGTERM comes only after
the grace time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.ranks.rank_pool import undisturbed
from tests.runs import Run

TWO_NODES = ("--nodes", "2", "--gpus", "1", "--cpus-per-gpu", "1")
pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("user_signal")]


@pytest.fixture(scope="module")
def user_signal(cluster: Any) -> Iterator[None]:
    cluster.up("--preempt-user-signal")
    yield
    cluster.up()


def test_signal_of_the_job_comes_first(cluster: Any, submit: Callable[..., str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    traps = f'for s in USR1 TERM; do trap "echo $s >>{log}; exit" $s; done'
    step = f"{traps}; echo start >>{log}; while true; do sleep 0.2; done"
    submit(f"srun bash -c '{step}'", "-N1", "-w", "node02", "--exclusive", "-p", "low", "--signal=USR1@5")
    cluster.wait_for(lambda: log.exists() and "start" in log.read_text(), 60, "the start of the job in low")
    submit("true", "-N1", "-w", "node02", "--exclusive", "-p", "high")
    cluster.wait_for(lambda: len(log.read_text().split()) > 1, 60, "a signal in the job in low")
    assert log.read_text().split() == ["start", "USR1"]


def test_signal_at_preemption_counts_as_warning(
    submit_run: Callable[..., Run], preempt: Callable[[Run], None], recipe: Path, tmp_path: Path
) -> None:
    # The time limit is so near that the same signal could also mean the limit.
    run = submit_run(*TWO_NODES, "--layout", "fsdp", "--time", "2", str(recipe))
    run.wait_for_step(10)
    preempt(run)
    status = run.complete()
    assert run.endings()[0] == "preempted"
    assert runs.resumed_at_the_next_step(status)
    assert run.digest() == undisturbed(run.path, tmp_path / "alone")
