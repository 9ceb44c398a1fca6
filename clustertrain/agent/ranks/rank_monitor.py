"""Monitoring of a node's ranks by their records and processes: which ended, are stopped, or hang at exit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clustertrain.agent.node_result import read_finished_records, read_rank_records
from clustertrain.run.results import RankResult
from clustertrain.scheduler.torchrun import FAILURE_GRACE_S

if TYPE_CHECKING:
    import psutil

AFTER_END_S = 20.0
# A rank hangs at exit if it idles this long after all others have completed: longer than a server takes to answer the
# last request of an upload.
EXIT_PATIENCE_S = 600.0
MIN_IDLE_S = 60.0  # if the job is being ended anyway
HANG_CHECK_INTERVAL_S = 10.0
# Share of one core for all remaining processes of the node. Sleeping processes use none, polling threads less.
_IDLE_SHARE = 0.005


class RankMonitor:
    """Monitor of the ranks of one node.

    ``others_done`` returns whether the ranks of all other nodes have completed.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], torchrun_pid: int, others_done: Callable[[], bool]) -> None:
        self._folder = folder
        self._ranks = ranks
        self._torchrun_pid = torchrun_pid
        self._others_done = others_done
        self._hang_detector = ExitHangDetector()
        self._next_hang_check = 0.0
        self._failed_at: float | None = None
        self.ended_at: float | None = None
        self.stopped_ranks: frozenset[int] = frozenset()  # see RankObservations
        self.hung_ranks: frozenset[int] = frozenset()

    def poll(self, now: float) -> None:
        """Update the state; called once per second."""
        records = read_rank_records(self._folder, self._ranks)
        if len(records) == len(self._ranks):
            self.ended_at = self.ended_at or now
        if self._failed_at is None and any(r.ending == "failed" for r in records.values()):
            self._failed_at = now
            self._note_stopped()
        if now >= self._next_hang_check and self.ended_at is None:
            self._next_hang_check = now + HANG_CHECK_INTERVAL_S
            self._check_exit_hang(now, records)

    def should_terminate(self, now: float) -> bool:
        """Return whether torchrun should be ended."""
        return (
            bool(self.hung_ranks)
            or _has_elapsed(self._failed_at, FAILURE_GRACE_S, now)
            or _has_elapsed(self.ended_at, AFTER_END_S, now)
        )

    def record_final_state(self, now: float) -> None:
        """Record stopped and hung ranks before the agent ends the ranks."""
        self._note_stopped()
        if self._hang_detector.was_hanging(now):
            self.hung_ranks = frozenset(self._ranks) - read_rank_records(self._folder, self._ranks).keys()

    def _note_stopped(self) -> None:
        import psutil

        stopped_states = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        self.stopped_ranks |= {
            rank for rank, found in self._processes().items() if any(_status(p) in stopped_states for p in found)
        }

    def _check_exit_hang(self, now: float, records: dict[int, RankResult]) -> None:
        completed = all(r.ending == "completed" for r in records.values())
        remaining = [r for r in self._ranks if r not in records]
        finished = read_finished_records(self._folder, remaining)
        is_exiting = completed and (bool(records) or len(finished) == len(remaining))
        # A rank whose process cannot be found may be working: setproctitle overwrites the environment that shows it.
        is_exiting = is_exiting and set(remaining) <= self._processes().keys()
        cpu_s = self._cpu_seconds(remaining) if is_exiting else {}
        if self._hang_detector.is_hanging(now, is_exiting and self._others_done(), cpu_s):
            self.hung_ranks = frozenset(remaining)

    def _cpu_seconds(self, ranks: Sequence[int]) -> dict[int, float]:
        import psutil

        cpu_s = {}
        for process in [p for rank, found in self._processes().items() if rank in ranks for p in found]:
            with contextlib.suppress(psutil.Error):
                for p in (process, *process.children(recursive=True)):
                    times = p.cpu_times()
                    cpu_s[p.pid] = times.user + times.system
        return cpu_s

    def _processes(self) -> dict[int, list[psutil.Process]]:
        """Return the child processes of torchrun or of the agent by rank: two for a rank in podman's container."""
        import psutil

        processes: dict[int, list[psutil.Process]] = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._torchrun_pid).children():
                with contextlib.suppress(psutil.Error, ValueError):
                    processes.setdefault(int(child.environ().get("RANK", "")), []).append(child)
        return processes


def _status(process: psutil.Process) -> str:
    import psutil

    try:
        return str(process.status())
    except psutil.Error:
        return ""


def _has_elapsed(since: float | None, timeout_s: float, now: float) -> bool:
    return since is not None and now - since > timeout_s


class ExitHangDetector:
    """Detector of ranks that idle after all others have completed; call it every HANG_CHECK_INTERVAL_S.

    An export or upload uses CPU time. So does a rank that spins in a collective, which is therefore not ended.
    """

    def __init__(self) -> None:
        self._cpu_s: Mapping[int, float] = {}
        self._checked_at: float | None = None
        self._idle_since: float | None = None  # since then, all others have completed and the remaining ranks are idle

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
        return now - self._idle_since >= EXIT_PATIENCE_S

    def was_hanging(self, now: float) -> bool:
        """Return whether the remaining ranks were idle long enough to count as hanging when the job was ended."""
        return self._idle_since is not None and now - self._idle_since >= MIN_IDLE_S
