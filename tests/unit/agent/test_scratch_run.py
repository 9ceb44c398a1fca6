"""Signals while ranks run in a temporary run folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from clustertrain.agent import scratch_run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalsWhenDestroyed:
    """Python discards the exception that the signal's handler raises in the destructor."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self._number)
        for _ in range(1000):  # Python runs the handler between two instructions
            pass


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Set the default handlers; a shell that starts a background process ignores SIGINT."""
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_interrupts(number: signal.Signals) -> None:
    previous = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), scratch_run.interruptible():
        signal.raise_signal(number)
        pytest.fail("the signal did not interrupt")
    assert signal.getsignal(number) is previous


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", SIGNALS)
def test_discarded_interrupt_is_raised_again(number: signal.Signals) -> None:
    noticed_in_loop = False
    with pytest.raises(KeyboardInterrupt), scratch_run.interruptible() as raise_if_interrupted:
        SignalsWhenDestroyed(number)
        try:
            raise_if_interrupted()
        except KeyboardInterrupt:
            noticed_in_loop = True
    assert noticed_in_loop


def test_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with scratch_run.interruptible() as raise_if_interrupted:
        signal.raise_signal(signal.SIGHUP)
        raise_if_interrupted()
