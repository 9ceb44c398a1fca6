"""Which signal the ranks of a command get, and whether they get it once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clustertrain import clock
from clustertrain.agent.ranks.command_ranks import CommandRanks, build_rank_environment
from clustertrain.agent.ranks.command_stop import CommandStop
from clustertrain.config.command_options import parse_stop_signal
from clustertrain.scheduler.rendezvous import Rendezvous

PROGRAM = """
import pathlib, signal, sys, time
for name in sys.argv[1].split(","):
    signal.signal(signal.Signals[name], lambda number, _: print(signal.Signals(number).name, flush=True))
pathlib.Path("ready").touch()
time.sleep(60)
"""


class Impossible:
    """Ranks that cannot agree on a step."""

    def poll(self) -> str:
        return "impossible"


@pytest.fixture
def stop() -> Iterator[CommandStop]:
    stop = CommandStop()
    yield stop
    stop.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., CommandRanks]]:
    started: list[CommandRanks] = []

    def start_rank(handled: str, stop_signal: str = "TERM") -> CommandRanks:
        env = build_rank_environment(
            os.environ, Rendezvous("127.0.0.1", 29_500, "run"), local_rank=0, ranks_per_node=1, nodes=1, node_rank=0
        )
        started.append(
            CommandRanks(
                (sys.executable, "-c", PROGRAM, handled), {0: env}, cwd=tmp_path, rank_dir=tmp_path,
                stop_requested=lambda: True, logs={0: tmp_path / "log"}, stop_signal=parse_stop_signal(stop_signal),
            )
        )  # fmt: skip
        assert clock.wait_until((tmp_path / "ready").exists, 30.0)
        return started[-1]

    yield start_rank
    for ranks in started:
        ranks.kill()


def request(stop: CommandStop, ranks: CommandRanks, cause: str, *, is_own_script: bool = False) -> None:
    agreement: Any = Impossible()
    stop.begin(cause, lambda: agreement)
    stop.poll(ranks, is_own_script=is_own_script)


def received(folder: Path, count: int) -> list[str]:
    clock.wait_until(lambda: len((folder / "log").read_text().split()) >= count, 5.0 if count else 0.5)
    return (folder / "log").read_text().split()


def send(pid: int, number: signal.Signals) -> None:
    psutil.Process(pid).send_signal(number)


def test_signal_that_only_the_agent_got_is_sent_on(
    stop: CommandStop, start: Callable[..., CommandRanks], tmp_path: Path
) -> None:
    ranks = start("SIGTERM")
    request(stop, ranks, "signal:SIGTERM")
    stop.poll(ranks, is_own_script=False)
    assert received(tmp_path, 1) == ["SIGTERM"]


def test_signal_that_the_ranks_got_is_not_repeated(
    stop: CommandStop, start: Callable[..., CommandRanks], tmp_path: Path
) -> None:
    ranks = start("SIGTERM")
    send(stop._witness._process.pid, signal.SIGTERM)
    request(stop, ranks, "signal:SIGTERM")
    assert received(tmp_path, 0) == []


@pytest.mark.parametrize(("handled", "is_own_script", "expected"), [
    ("SIGTERM,SIGUSR1", True, "SIGUSR1"), ("SIGTERM", True, "SIGTERM"), ("SIGTERM,SIGUSR1", False, "SIGTERM"),
])  # fmt: skip
def test_own_warning_is_the_stop_signal_of_a_program_that_handles_it(
    stop: CommandStop, start: Callable[..., CommandRanks], tmp_path: Path,
    handled: str, is_own_script: bool, expected: str,
) -> None:  # fmt: skip
    request(stop, start(handled), "signal:SIGUSR1", is_own_script=is_own_script)
    assert received(tmp_path, 1) == [expected]


def test_signal_that_the_ranks_ignored_is_sent_again(
    stop: CommandStop, start: Callable[..., CommandRanks], tmp_path: Path
) -> None:
    ranks = start("SIGTERM", stop_signal="USR2")
    send(stop._witness._process.pid, signal.SIGUSR2)
    stop.note_signals(ranks)  # no handler yet
    assert not stop._witness.has_received(signal.SIGUSR2)
    assert not ranks.handle(signal.SIGUSR2) and ranks.handle(signal.SIGTERM)
