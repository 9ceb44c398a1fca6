"""The only access to time: wall time for records (UTC epoch seconds), monotonic time for durations."""

from __future__ import annotations

import time
from collections.abc import Callable


def now() -> float:
    return time.time()


def monotonic() -> float:
    return time.monotonic()


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.1) -> bool:
    """Poll ``condition`` until it is true or ``timeout_s`` has passed; return its last value."""
    deadline = monotonic() + timeout_s
    while True:
        if condition():
            return True
        if monotonic() >= deadline:
            return False
        time.sleep(poll_s)
