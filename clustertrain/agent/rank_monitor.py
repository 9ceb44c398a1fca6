"""The ranks of a node while they run: what they have said, and what can be seen of their processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertrain.agent.hang_at_exit import LOOK_S, AtEnd
from clustertrain.agent.node_result import read_left, read_ranks
from clustertrain.scheduler.torchrun import AFTER_FAILURE_S

if TYPE_CHECKING:
    import psutil

AFTER_END_S = 20.0


class Watched:
    """``others_done``: whether the ranks of all other nodes have completed; asked while some of this node's have."""

    def __init__(self, folder: Path, ranks: Sequence[int], torchrun_pid: int, others_done: Callable[[], bool]) -> None:
        self._folder = folder
        self._ranks = ranks
        self._torchrun_pid = torchrun_pid
        self._others_done = others_done
        self._at_end = AtEnd()
        self._next_at_end = 0.0
        self._failed_at: float | None = None
        self.ended_at: float | None = None
        self.stopped: frozenset[int] = frozenset()  # see results.Seen
        self.hung: frozenset[int] = frozenset()

    def look(self, now: float) -> None:
        """Once a second."""
        records = read_ranks(self._folder, self._ranks)
        if len(records) == len(self._ranks):
            self.ended_at = self.ended_at or now
        if self._failed_at is None and any(r["ending"] == "failed" for r in records.values()):
            self._failed_at = now
            self._note_stopped()
        if now >= self._next_at_end and self.ended_at is None:
            self._next_at_end = now + LOOK_S
            self._look_at_the_end(now, records)

    def over(self, now: float) -> bool:
        """Whether torchrun has no reason left to live."""
        return bool(self.hung) or _past(self._failed_at, AFTER_FAILURE_S, now) or _past(self.ended_at, AFTER_END_S, now)

    def give_up(self, now: float) -> None:
        """Before the ranks are ended from outside."""
        self._note_stopped()
        if self._at_end.hung_until(now):
            self.hung = frozenset(self._ranks) - read_ranks(self._folder, self._ranks).keys()

    def _note_stopped(self) -> None:
        import psutil

        stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        self.stopped |= {rank for rank, p in self._processes().items() if _status(p) in stopped}

    def _look_at_the_end(self, now: float, records: dict[int, dict[str, Any]]) -> None:
        completed = all(r["ending"] == "completed" for r in records.values())
        rest = [r for r in self._ranks if r not in records]
        passed = read_left(self._folder, rest)
        at_end = completed and (bool(records) or len(passed) == len(rest))
        # A rank whose process cannot be found may be working: setproctitle overwrites the environment that shows it.
        at_end = at_end and set(rest) <= self._processes().keys()
        used_s = self._used_s(rest) if at_end else {}
        if self._at_end.hangs(now, at_end and self._others_done(), used_s):
            self.hung = frozenset(rest)

    def _used_s(self, ranks: Sequence[int]) -> dict[int, float]:
        import psutil

        used = {}
        for rank, process in self._processes().items():
            with contextlib.suppress(psutil.Error):
                for p in (process, *process.children(recursive=True)) if rank in ranks else ():
                    times = p.cpu_times()
                    used[p.pid] = times.user + times.system
        return used

    def _processes(self) -> dict[int, psutil.Process]:
        """The children of torchrun by the rank that it gave each."""
        import psutil

        found = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._torchrun_pid).children():
                with contextlib.suppress(psutil.Error, ValueError):
                    found[int(child.environ().get("RANK", ""))] = child
        return found


def _status(process: psutil.Process) -> str:
    import psutil

    try:
        return str(process.status())
    except psutil.Error:
        return ""


def _past(since: float | None, allowed_s: float, now: float) -> bool:
    return since is not None and now - since > allowed_s
