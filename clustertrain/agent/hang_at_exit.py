"""Ranks that hang at their end: all others have completed, and what is left neither works nor ends."""

from __future__ import annotations

from collections.abc import Mapping

# Longer than a server takes to answer the last request of an upload.
PATIENCE_S = 600.0
MIN_IDLE_S = 60.0  # where the job is being ended anyway
CHECK_INTERVAL_S = 10.0
# Of a core, for all that is left on the node: a process that sleeps uses none, threads that poll use less.
_IDLE_SHARE = 0.005


class ExitHangDetector:
    """Looked at every LOOK_S. An export or an upload uses the processor; what spins in a collective does too, and is
    left alone."""

    def __init__(self) -> None:
        self._cpu_s: Mapping[int, float] = {}
        self._checked_at: float | None = None
        self._idle_since: float | None = None  # when all others were done and the rest did nothing any more

    def is_hanging(self, now: float, others_done: bool, cpu_s: Mapping[int, float]) -> bool:
        """``cpu_s``: by process, the processor seconds of the ranks that are left and all below them."""
        previous, checked_at = self._cpu_s, self._checked_at
        self._cpu_s, self._checked_at = cpu_s, now
        if checked_at is None or not others_done:
            self._idle_since = None
            return False
        worked_s = sum(max(0.0, s - previous.get(pid, 0.0)) for pid, s in cpu_s.items())
        if worked_s > _IDLE_SHARE * (now - checked_at):
            self._idle_since = None
            return False
        self._idle_since = checked_at if self._idle_since is None else self._idle_since
        return now - self._idle_since >= PATIENCE_S

    def was_hanging(self, now: float) -> bool:
        """Whether what is left has done nothing for so long that it was hanging when it was ended from outside."""
        return self._idle_since is not None and now - self._idle_since >= MIN_IDLE_S
