"""What an agent sees of the processes of its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from clustertrain import clock, fsio, proc
from clustertrain.agent.hang_at_exit import PATIENCE_S
from clustertrain.agent.node_agent import NodeAgent
from clustertrain.agent.rank_monitor import RankMonitor
from tests.unit.agent.test_node_agent_settings import MEETING, agent

# In the place of torchrun: two ranks, each with its number in its environment, that do nothing.
PARENT = "RANK=4 sleep 600 & RANK=5 sleep 600 & wait"


@pytest.fixture
def torchrun() -> Iterator[int]:
    parent = subprocess.Popen(["/bin/sh", "-c", PARENT], start_new_session=True)
    try:
        assert clock.wait_until(lambda: set(ranks_below(parent.pid)) == {"4", "5"}, 10.0)
        yield parent.pid
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def ranks_below(pid: int) -> dict[str, psutil.Process]:
    found = {}
    for child in psutil.Process(pid).children():
        if child.name() == "sleep":
            found[child.environ().get("RANK", "")] = child
    return found


def watched(folder: Path, torchrun: int, *, others_done: bool = True) -> RankMonitor:
    return RankMonitor(folder, [4, 5], torchrun, lambda: others_done)


def record(folder: Path, rank: int, ending: str, name: str = "rank") -> None:
    fsio.write_json(folder / f"{name}-{rank}.json", {"rank": rank, "ending": ending})


def hung_after_patience(one: RankMonitor) -> frozenset[int]:
    for now in (0.0, 10.0, PATIENCE_S - 10.0):
        one.poll(now)
        assert not one.should_terminate(now)
    one.poll(PATIENCE_S + 10.0)
    assert one.should_terminate(PATIENCE_S + 10.0) == bool(one.hung_ranks)
    return one.hung_ranks


def test_a_rank_that_sleeps_after_all_others_have_completed(tmp_path: Path, torchrun: int) -> None:
    record(tmp_path, 4, "completed")
    assert hung_after_patience(watched(tmp_path, torchrun)) == {5}


def test_a_rank_whose_process_cannot_be_found_may_be_working(tmp_path: Path, torchrun: int) -> None:
    """setproctitle overwrites the environment that shows a process's rank."""
    one = RankMonitor(tmp_path, [4, 6], torchrun, lambda: True)
    record(tmp_path, 4, "completed")
    assert not hung_after_patience(one)


def test_ranks_that_sleep_after_their_last_step(tmp_path: Path, torchrun: int) -> None:
    for rank in (4, 5):
        record(tmp_path, rank, "completed", "finished")
    assert hung_after_patience(watched(tmp_path, torchrun)) == {4, 5}


def test_ranks_that_sleep_in_the_middle_of_their_work_are_left_alone(tmp_path: Path, torchrun: int) -> None:
    record(tmp_path, 5, "completed", "finished")
    assert not hung_after_patience(watched(tmp_path, torchrun))


def test_while_another_node_is_at_work_nobody_hangs_at_its_end(tmp_path: Path, torchrun: int) -> None:
    record(tmp_path, 4, "completed")
    assert not hung_after_patience(watched(tmp_path, torchrun, others_done=False))


@pytest.mark.parametrize(("waited_s", "hung"), [(20.0, set()), (70.0, {5})])
def test_a_rank_that_hangs_at_its_end_when_the_time_limit_comes(
    tmp_path: Path, torchrun: int, waited_s: float, hung: set[int]
) -> None:
    record(tmp_path, 4, "completed")
    one = watched(tmp_path, torchrun)
    one.poll(0.0)
    one.poll(10.0)
    one.record_final_state(waited_s)
    assert one.hung_ranks == hung


def test_a_stopped_process_is_seen_when_its_peer_has_failed(tmp_path: Path, torchrun: int) -> None:
    one = watched(tmp_path, torchrun)
    one.poll(0.0)
    stopped = ranks_below(torchrun)["5"]
    stopped.suspend()
    assert clock.wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, 10.0)
    record(tmp_path, 4, "failed")
    one.poll(1.0)
    assert one.stopped_ranks == {5}


def test_a_run_whose_steps_are_done_is_complete_though_a_rank_hangs_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = agent(tmp_path)
    real = clock.monotonic
    monkeypatch.setattr(clock, "monotonic", lambda: 1000 * real())  # ten minutes in 0.6 s
    monkeypatch.setattr(NodeAgent, "_join_rendezvous", lambda self: MEETING)
    sleeping = ["/bin/sh", "-c", "RANK=0 sleep 600 & wait"]
    monkeypatch.setattr(NodeAgent, "_start_torchrun", lambda self, meeting: proc.start(sleeping, new_session=True))
    done = {"rank": 0, "ending": "completed", "finished": True, "step": 7, "committed_step": 7}
    fsio.write_json(one.rank_dir / "finished-0.json", done)
    result = one._run_ranks()
    assert (result.ending, result.step, result.committed_step) == ("completed", 7, 7)
    assert result.reason == "all steps were done; rank 0 was idle after all others had completed, and was ended"
