"""Detection of ranks that hang at exit: all others have completed, and the remaining ones neither work nor end."""

from __future__ import annotations

from collections.abc import Mapping

# Longer than a server takes to answer the last request of an upload.
PATIENCE_S = 600.0
MIN_IDLE_S = 60.0  # if the job is being ended anyway
CHECK_INTERVAL_S = 10.0
# Share of one core for all remaining processes of the node. Sleeping processes use none, polling threads less.
_IDLE_SHARE = 0.005


class ExitHangDetector:
    """Detector of idle ranks; call it every CHECK_INTERVAL_S.

    An export or upload uses CPU time. So does a rank that spins in a collective, which is therefore not ended.
    """

    def __init__(self) -> None:
        self._cpu_s: Mapping[int, float] = {}
        self._checked_at: float | None = None
        self._idle_since: float | None = None  # since then all others are done and the rest is idle

    def is_hanging(self, now: float, others_done: bool, cpu_s: Mapping[int, float]) -> bool:
        """Return whether the remaining ranks hang. ``cpu_s``: CPU seconds of them and their children, by pid."""
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
        """Return whether the remaining ranks were idle long enough to count as hanging when the job was ended."""
        return self._idle_since is not None and now - self._idle_since >= MIN_IDLE_S
