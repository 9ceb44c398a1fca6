"""The witness shows which signals reach the ranks of a command."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from clustertrain.agent.ranks.signal_witness import SignalWitness


@pytest.fixture
def witness() -> Iterator[SignalWitness]:
    witness = SignalWitness()
    yield witness
    witness.close()


def test_signals_stay_pending(witness: SignalWitness) -> None:
    pid = witness._process.pid
    assert not any(witness.has_received(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
    os.kill(pid, signal.SIGTERM)
    assert witness.has_received(signal.SIGTERM) and not witness.has_received(signal.SIGUSR1)
    assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_killed_witness_has_received_nothing(witness: SignalWitness) -> None:
    os.kill(witness._process.pid, signal.SIGKILL)
    witness._process.wait()
    assert not witness.has_received(signal.SIGTERM)


def test_witness_ends_with_its_agent(witness: SignalWitness) -> None:
    assert witness._process.stdin is not None
    witness._process.stdin.close()
    assert witness._process.wait(10) == 1
