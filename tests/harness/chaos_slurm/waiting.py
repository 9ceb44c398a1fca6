"""Waits of the storm's threads, which Ctrl-C interrupts immediately."""

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
    """Lock that admits the rounds of several threads, or one exclusive round that affects the whole cluster."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._shared, self._waiting, self._exclusive = 0, 0, False

    @contextmanager
    def take(self, exclusive: bool) -> Iterator[None]:
        with self._free:
            self._waiting += exclusive
            while self._exclusive or (self._shared if exclusive else self._waiting):
                self._free.wait(POLL_S)
                if _stopped.is_set():
                    raise Stopped
            self._waiting -= exclusive
            self._exclusive, self._shared = exclusive, self._shared + (not exclusive)
        try:
            yield
        finally:
            with self._free:
                self._exclusive, self._shared = False, self._shared - (not exclusive)
                self._free.notify_all()
