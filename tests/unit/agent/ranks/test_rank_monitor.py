"""The agent's monitor of its ranks' processes: which ones hang, and which ones were stopped."""

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
from clustertrain.agent.ranks.rank_monitor import EXIT_PATIENCE_S, HANG_CHECK_INTERVAL_S, ExitHangDetector, RankMonitor
from tests.unit.agent.test_node_agent_settings import RENDEZVOUS, agent

# Stands in for torchrun: two idle ranks, each with its number in its environment.
TORCHRUN_SCRIPT = "RANK=4 sleep 600 & RANK=5 sleep 600 & wait"


@pytest.fixture
def torchrun() -> Iterator[int]:
    parent = subprocess.Popen(["/bin/sh", "-c", TORCHRUN_SCRIPT], start_new_session=True)
    try:
        assert clock.wait_until(lambda: set(find_ranks(parent.pid)) == {"4", "5"}, 10.0)
        yield parent.pid
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def find_ranks(pid: int) -> dict[str, psutil.Process]:
    ranks = {}
    for child in psutil.Process(pid).children():
        if child.name() == "sleep":
            ranks[child.environ().get("RANK", "")] = child
    return ranks


def make_monitor(folder: Path, torchrun: int, *, others_done: bool = True) -> RankMonitor:
    return RankMonitor(folder, [4, 5], torchrun, lambda: others_done)


def write_record(folder: Path, rank: int, ending: str, name: str = "rank") -> None:
    fsio.write_json(folder / f"{name}-{rank}.json", {"rank": rank, "ending": ending})


def hung_ranks_after_patience(monitor: RankMonitor) -> frozenset[int]:
    for now in (0.0, 10.0, EXIT_PATIENCE_S - 10.0):
        monitor.poll(now)
        assert not monitor.should_terminate(now)
    monitor.poll(EXIT_PATIENCE_S + 10.0)
    assert monitor.should_terminate(EXIT_PATIENCE_S + 10.0) == bool(monitor.hung_ranks)
    return monitor.hung_ranks


def test_idle_rank_hangs_after_all_others_completed(tmp_path: Path, torchrun: int) -> None:
    write_record(tmp_path, 4, "completed")
    assert hung_ranks_after_patience(make_monitor(tmp_path, torchrun)) == {5}


def test_rank_whose_process_is_not_found_does_not_hang(tmp_path: Path, torchrun: int) -> None:
    """Example: setproctitle has overwritten the environment that shows the rank of the process."""
    monitor = RankMonitor(tmp_path, [4, 6], torchrun, lambda: True)
    write_record(tmp_path, 4, "completed")
    assert not hung_ranks_after_patience(monitor)


def test_idle_ranks_hang_after_their_last_step(tmp_path: Path, torchrun: int) -> None:
    for rank in (4, 5):
        write_record(tmp_path, rank, "completed", "finished")
    assert hung_ranks_after_patience(make_monitor(tmp_path, torchrun)) == {4, 5}


def test_idle_ranks_do_not_hang_while_one_has_steps_left(tmp_path: Path, torchrun: int) -> None:
    write_record(tmp_path, 5, "completed", "finished")
    assert not hung_ranks_after_patience(make_monitor(tmp_path, torchrun))


def test_idle_rank_does_not_hang_while_another_node_works(tmp_path: Path, torchrun: int) -> None:
    write_record(tmp_path, 4, "completed")
    assert not hung_ranks_after_patience(make_monitor(tmp_path, torchrun, others_done=False))


@pytest.mark.parametrize(("waited_s", "hung"), [(20.0, set()), (70.0, {5})])
def test_rank_idle_long_enough_at_the_time_limit_hangs(
    tmp_path: Path, torchrun: int, waited_s: float, hung: set[int]
) -> None:
    write_record(tmp_path, 4, "completed")
    monitor = make_monitor(tmp_path, torchrun)
    monitor.poll(0.0)
    monitor.poll(10.0)
    monitor.record_final_state(waited_s)
    assert monitor.hung_ranks == hung


def test_stopped_process_is_found_when_its_peer_fails(tmp_path: Path, torchrun: int) -> None:
    monitor = make_monitor(tmp_path, torchrun)
    monitor.poll(0.0)
    stopped = find_ranks(torchrun)["5"]
    stopped.suspend()
    assert clock.wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, 10.0)
    write_record(tmp_path, 4, "failed")
    monitor.poll(1.0)
    assert monitor.stopped_ranks == {5}


@pytest.mark.long
def test_run_with_all_steps_done_completes_despite_a_hung_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_agent = agent(tmp_path)
    real = clock.monotonic
    monkeypatch.setattr(clock, "monotonic", lambda: 1000 * real())  # ten minutes in 0.6 s
    monkeypatch.setattr(NodeAgent, "_join_rendezvous", lambda self: RENDEZVOUS)
    sleeping = ["/bin/sh", "-c", "RANK=0 sleep 600 & wait"]
    monkeypatch.setattr(NodeAgent, "_start_torchrun", lambda self, meeting: proc.start(sleeping, new_session=True))
    done = {"rank": 0, "ending": "completed", "finished": True, "step": 7, "committed_step": 7}
    fsio.write_json(node_agent.rank_dir / "finished-0.json", done)
    result = node_agent._run_ranks()
    assert (result.ending, result.step, result.committed_step) == ("completed", 7, 7)
    assert result.reason == "all steps were done; rank 0 was idle after all others had completed, and was ended"


def seconds_until_hanging(
    cpu_per_s: float, *, others_done_from_s: float = 0.0, until_s: float = 5000.0
) -> float | None:
    """Return after how many seconds the remaining rank counts as hanging, or None if it never does."""
    detector, now = ExitHangDetector(), 0.0
    while now <= until_s:
        if detector.is_hanging(now, now >= others_done_from_s, {17: cpu_per_s * now}):
            return now
        now += HANG_CHECK_INTERVAL_S
    return None


def test_idle_rank_hangs_after_the_patience() -> None:
    assert seconds_until_hanging(0.0) == EXIT_PATIENCE_S
    assert seconds_until_hanging(0.001) == EXIT_PATIENCE_S


def test_working_rank_never_hangs() -> None:
    assert seconds_until_hanging(0.02) is None


def test_patience_starts_when_the_other_ranks_are_done() -> None:
    late = seconds_until_hanging(0.0, others_done_from_s=1000.0)
    assert (
        late is not None
        and 1000.0 + EXIT_PATIENCE_S - HANG_CHECK_INTERVAL_S <= late <= 1000.0 + EXIT_PATIENCE_S + HANG_CHECK_INTERVAL_S
    )


def test_work_restarts_the_patience() -> None:
    detector, used = ExitHangDetector(), {17: 0.0}
    assert not any(detector.is_hanging(t, True, used) for t in range(0, 590, 10))
    assert not detector.is_hanging(590.0, True, {17: 1.0, 18: 2.0})
    assert not any(detector.is_hanging(t, True, {17: 1.0}) for t in range(600, 1190, 10))
    assert detector.is_hanging(1190.0, True, {17: 1.0})
