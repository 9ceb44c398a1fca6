"""Ranks that hang at their end: all others have completed, and what is left neither works nor ends."""

from __future__ import annotations

from collections.abc import Mapping

# Longer than a server takes to answer the last request of an upload.
PATIENCE_S = 600.0
ENOUGH_S = 60.0  # where the job is being ended anyway
LOOK_S = 10.0
# Of a core, for all that is left on the node: a process that sleeps uses none, threads that poll use less.
_IDLE_SHARE = 0.005


class AtEnd:
    """Looked at every LOOK_S. An export or an upload uses the processor; what spins in a collective does too, and is
    left alone."""

    def __init__(self) -> None:
        self._used: Mapping[int, float] = {}
        self._looked: float | None = None
        self._since: float | None = None  # when all others were done and the rest did nothing any more

    def hangs(self, now: float, others_done: bool, used_s: Mapping[int, float]) -> bool:
        """``used_s``: by process, the processor seconds of the ranks that are left and all below them."""
        before, looked = self._used, self._looked
        self._used, self._looked = used_s, now
        if looked is None or not others_done:
            self._since = None
            return False
        worked_s = sum(max(0.0, s - before.get(pid, 0.0)) for pid, s in used_s.items())
        if worked_s > _IDLE_SHARE * (now - looked):
            self._since = None
            return False
        self._since = looked if self._since is None else self._since
        return now - self._since >= PATIENCE_S

    def hung_until(self, now: float) -> bool:
        """Whether what is left has done nothing for so long that it was hanging when it was ended from outside."""
        return self._since is not None and now - self._since >= ENOUGH_S
