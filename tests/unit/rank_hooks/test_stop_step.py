"""The agreement on a stop step: agents of several nodes and ranks that step at different speeds."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertrain import clock, fsio
from clustertrain.agent.ranks import stop_step
from clustertrain.agent.ranks.stop_step import StopStepAgreement
from clustertrain.rank_hooks.clustertrain_hooks.heartbeat import Heartbeat
from clustertrain.rank_hooks.clustertrain_hooks.rank import Rank
from clustertrain.rank_hooks.clustertrain_hooks.stop_step import StopStep


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


class Program(threading.Thread):
    """A rank that steps until it is told to stop. ``barrier`` is its collective in each step, if it has one."""

    def __init__(self, rank_dir: Path, rank: int, step_s: float, barrier: threading.Barrier | None) -> None:
        super().__init__(daemon=True)
        self.rank = Rank(rank=rank, world_size=4, attempt=1, run_dir=str(rank_dir), rank_dir=str(rank_dir))
        self.stop = StopStep(self.rank)
        self.step_s, self.barrier = step_s, barrier
        self.stopped_at: int | None = None

    def run(self) -> None:
        beat = Heartbeat(self.rank.rank_dir, self.rank.rank)
        generator = random.Random(self.rank.rank)
        for step in range(1, 2000):
            time.sleep(self.step_s * generator.uniform(0.5, 1.5))
            if self.barrier is not None:
                self.barrier.wait(30)
            beat.step = step
            beat.write()
            if self.stop.is_reached(step):
                self.stopped_at = step
                return


def start_programs(tmp_path: Path, nodes: int, step_s: float, *, in_step: bool) -> list[Program]:
    ranks = [(node, rank) for node in range(nodes) for rank in (2 * node, 2 * node + 1)]
    barrier = threading.Barrier(len(ranks)) if in_step else None
    programs = []
    for node, rank in ranks:
        (tmp_path / f"node-{node}").mkdir(exist_ok=True)
        programs.append(Program(tmp_path / f"node-{node}", rank, step_s, barrier))
        programs[-1].stop.offer("test")
    for program in programs:
        program.start()
    return programs


def build_agents(tmp_path: Path, nodes: int) -> list[StopStepAgreement]:
    names = [f"n{node}" for node in range(nodes)]
    return [
        StopStepAgreement(
            tmp_path / "stop-step", tmp_path / f"node-{node}", names, node, [2 * node, 2 * node + 1]
        )
        for node in range(nodes)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "step_s", "in_step"),
    [
        (1, 0.002, False),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(1, 0.3, False), (1, 0.002, True), (2, 0.2, True)]),
        (2, 0.003, True),
    ],
)
def test_all_ranks_stop_after_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, step_s: float, in_step: bool
) -> None:
    monkeypatch.setattr(stop_step, "LATENCY_ACROSS_NODES_S", 0.05)  # too short: proposals have to be moved
    programs = start_programs(tmp_path, nodes, step_s, in_step=in_step)
    time.sleep(0.2)
    agents = build_agents(tmp_path, nodes)
    assert clock.wait_until(lambda: {agent.poll() for agent in agents} == {"agreed"}, 30.0, 0.02)
    for program in programs:
        program.join(30)
    stopped = {program.stopped_at for program in programs}
    assert len(stopped) == 1
    assert None not in stopped


def test_late_proposal_is_refused_and_moved(tmp_path: Path) -> None:
    (tmp_path / "node-0").mkdir()
    ranks = [Program(tmp_path / "node-0", rank, 0.0, None) for rank in (0, 1)]
    for rank in ranks:
        rank.stop.offer("test")
    (agent,) = build_agents(tmp_path, 1)
    assert clock.wait_until(lambda: agent.poll() == "pending" and agent._proposal is not None, 5.0, 0.05)
    first = fsio.read_json(tmp_path / "node-0" / "stop-step.json")
    assert not ranks[0].stop.is_reached(first["step"] + 7)
    assert not ranks[1].stop.is_reached(first["step"] - 1)
    assert clock.wait_until(lambda: agent.poll() == "pending" and agent._proposal.id == 2, 5.0, 0.05)
    second = fsio.read_json(tmp_path / "node-0" / "stop-step.json")
    assert (second["step"] > first["step"] + 7, second["is_agreed"]) == (True, False)


def test_node_without_a_framework_makes_it_impossible_for_all(tmp_path: Path) -> None:
    for node in (0, 1):
        (tmp_path / f"node-{node}").mkdir()
    Program(tmp_path / "node-0", 0, 0.0, None).stop.offer("test")
    Program(tmp_path / "node-0", 1, 0.0, None).stop.offer("test")
    agents = build_agents(tmp_path, 2)
    assert clock.wait_until(lambda: {agent.poll() for agent in agents} == {"impossible"}, 10.0, 0.05)


def test_rank_that_accepted_waits_until_its_deadline(tmp_path: Path) -> None:
    """Were it to go on, another rank might still stop at the step."""
    rank = Program(tmp_path, 0, 0.0, None)
    rank.stop.offer("test")
    rank.rank.write("stop-step.json", {"id": 1, "step": 5, "is_agreed": False})
    rank.rank.write("stop", {"deadline": time.time() + 0.5})
    assert not rank.stop.is_reached(4)
    assert not rank.stop.is_reached(5)
    assert time.time() > rank.rank.read("stop")["deadline"]
    assert rank.rank.read("stop-answer-0.json") == {"id": 1, "step": 4, "accepts": True}


def test_step_count_may_pass_over_the_agreed_step(tmp_path: Path) -> None:
    """Lightning counts the steps of all optimizers."""
    rank = Program(tmp_path, 0, 0.0, None)
    rank.stop.offer("test")
    rank.rank.write("stop-step.json", {"id": 1, "step": 5, "is_agreed": False})
    assert not rank.stop.is_reached(4)
    rank.rank.write("stop-step.json", {"id": 1, "step": 5, "is_agreed": True})
    assert rank.stop.is_reached(6)


def test_withdrawn_offer_leaves_nothing(tmp_path: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank = Program(tmp_path, 0, 0.0, None)
    rank.stop.offer("test")
    rank.stop.withdraw()
    assert (signal.getsignal(signal.SIGTERM), list(tmp_path.iterdir())) == (signal.SIG_DFL, [])
    rank.rank.write("stop-step.json", {"id": 1, "step": 5, "is_agreed": True})
    assert not rank.stop.is_reached(5)


def test_sigterm_counts_again_if_there_is_no_common_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has sent SIGTERM, which this rank has ignored."""
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append(number))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank = Program(tmp_path, 0, 0.0, None)
    rank.stop.offer("test")
    rank.rank.write("stop-step.json", {"id": 0, "step": None, "is_agreed": False})
    assert not rank.stop.is_reached(1)
    assert (sent, signal.getsignal(signal.SIGTERM)) == ([signal.SIGTERM], signal.SIG_DFL)


def test_handler_from_before_the_framework_is_put_back(tmp_path: Path) -> None:
    rank = Program(tmp_path, 0, 0.0, None)
    own, frameworks = (lambda *_: None), (lambda *_: None)
    signal.signal(signal.SIGTERM, frameworks)
    rank.stop.offer("test", handler=own)
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, frameworks)
    rank.stop.offer("test", handler=signal.SIG_DFL)
    assert signal.getsignal(signal.SIGTERM) not in (own, frameworks, signal.SIG_DFL)


def test_training_in_a_thread_offers_its_stop(tmp_path: Path) -> None:
    """Only the main thread may set a handler."""
    rank = Program(tmp_path, 0, 0.0, None)
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=rank.stop.offer, args=("test",))
    thread.start()
    thread.join(10)
    assert rank.rank.read("stops-0.json")["framework"] == "test"
    assert signal.getsignal(signal.SIGTERM) is before


def test_own_handler_of_the_program_stays(tmp_path: Path) -> None:
    signal.signal(signal.SIGTERM, own := lambda *_: None)
    Program(tmp_path, 0, 0.0, None).stop.offer("test")
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Program(tmp_path, 1, 0.0, None).stop.offer("test")
    assert callable(signal.getsignal(signal.SIGTERM))
