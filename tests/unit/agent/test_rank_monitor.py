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
from clustertrain.agent.node_agent import NodeAgent
from clustertrain.agent.rank_monitor import EXIT_PATIENCE_S, HANG_CHECK_INTERVAL_S, ExitHangDetector, RankMonitor
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
    for now in (0.0, 10.0, EXIT_PATIENCE_S - 10.0):
        one.poll(now)
        assert not one.should_terminate(now)
    one.poll(EXIT_PATIENCE_S + 10.0)
    assert one.should_terminate(EXIT_PATIENCE_S + 10.0) == bool(one.hung_ranks)
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


def ended_after(used_per_s: float, *, others_done_from_s: float = 0.0, until_s: float = 5000.0) -> float | None:
    """Seconds until what is left counts as hanging."""
    end, now = ExitHangDetector(), 0.0
    while now <= until_s:
        if end.is_hanging(now, now >= others_done_from_s, {17: used_per_s * now}):
            return now
        now += HANG_CHECK_INTERVAL_S
    return None


def test_a_rank_that_does_nothing_is_ended_when_the_patience_is_over() -> None:
    assert ended_after(0.0) == EXIT_PATIENCE_S
    assert ended_after(0.001) == EXIT_PATIENCE_S


def test_a_rank_that_works_is_waited_for() -> None:
    assert ended_after(0.02) is None


def test_the_patience_begins_when_the_others_are_done() -> None:
    late = ended_after(0.0, others_done_from_s=1000.0)
    assert (
        late is not None
        and 1000.0 + EXIT_PATIENCE_S - HANG_CHECK_INTERVAL_S <= late <= 1000.0 + EXIT_PATIENCE_S + HANG_CHECK_INTERVAL_S
    )


def test_work_in_between_starts_the_patience_again() -> None:
    end, used = ExitHangDetector(), {17: 0.0}
    assert not any(end.is_hanging(t, True, used) for t in range(0, 590, 10))
    assert not end.is_hanging(590.0, True, {17: 1.0, 18: 2.0})
    assert not any(end.is_hanging(t, True, {17: 1.0}) for t in range(600, 1190, 10))
    assert end.is_hanging(1190.0, True, {17: 1.0})
