"""Waiting in the storm's threads, which a Ctrl-C ends at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clustertrain import clock

POLL_S = 0.3


class Stopped(Exception):
    """The storm was interrupted, or stopped itself."""


_stopped = threading.Event()


def stop() -> None:
    _stopped.set()


def pause(seconds: float) -> None:
    if _stopped.wait(seconds):
        raise Stopped


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    deadline = clock.monotonic() + timeout_s
    while not condition():
        if clock.monotonic() > deadline:
            return False
        pause(poll_s)
    return True


class Turns:
    """Rounds of several threads at a time, or one alone: what is done to the whole cluster."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._shared, self._waiting, self._alone = 0, 0, False

    @contextmanager
    def take(self, alone: bool) -> Iterator[None]:
        with self._free:
            self._waiting += alone
            while self._alone or (self._shared if alone else self._waiting):
                self._free.wait(POLL_S)
                if _stopped.is_set():
                    raise Stopped
            self._waiting -= alone
            self._alone, self._shared = alone, self._shared + (not alone)
        try:
            yield
        finally:
            with self._free:
                self._alone, self._shared = False, self._shared - (not alone)
                self._free.notify_all()
