"""The node itself: processors, memory, load, and the processes below the agent."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import psutil

from clustertrain import clock

# In the order in which samples store them: a ratio of all processors, bytes, and the mean run queue of one minute.
HOST_FIELDS = ("cpu", "memory_used_bytes", "load1")

_SHORTEST_S = 0.05  # the kernel counts processor time in ticks of 10 ms


class HostFacts(msgspec.Struct, frozen=True):
    cpu_count: int | None
    memory_total_bytes: int | None


class HostReader:
    """Host-wide figures, of all users and jobs. One that cannot be read is None, with its reason in ``reasons``."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._before: tuple[float, float, float] | None = None
        self._cpu()

    def facts(self) -> HostFacts:
        try:
            total = int(psutil.virtual_memory().total)
        except (OSError, psutil.Error):
            total = None
        return HostFacts(psutil.cpu_count(), total)

    def read(self) -> list[float | None]:
        """The values in the order of HOST_FIELDS."""
        return [self._cpu(), self._guard("memory_used_bytes", _memory_used), self._guard("load1", _load1)]

    def _guard(self, field: str, call: Callable[[], float]) -> float | None:
        try:
            value = call()
        except (OSError, psutil.Error, ValueError) as e:
            self.reasons[field] = f"{type(e).__name__}: {e}"
            return None
        self.reasons.pop(field, None)
        return value

    def _cpu(self) -> float | None:
        """Busy share of all processors since the last call; None for the first."""
        now = clock.monotonic()
        busy_total = self._times()
        if busy_total is None:
            return None
        before, current = self._before, (now, *busy_total)
        if before is not None and now - before[0] < _SHORTEST_S:
            return None
        self._before = current
        if before is None or current[2] <= before[2]:
            return None
        return min(1.0, max(0.0, (current[1] - before[1]) / (current[2] - before[2])))

    def _times(self) -> tuple[float, float] | None:
        try:
            times = psutil.cpu_times()
        except (OSError, psutil.Error) as e:
            self.reasons["cpu"] = f"{type(e).__name__}: {e}"
            return None
        self.reasons.pop("cpu", None)
        # Linux counts guest time inside user time already.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return total - times.idle - getattr(times, "iowait", 0.0), total


def _memory_used() -> float:
    memory = psutil.virtual_memory()
    # Without the page cache, which the kernel gives back: psutil's "available" is what matters to a job.
    return float(memory.total - memory.available)


def _load1() -> float:
    return os.getloadavg()[0]


class TreeFigures(msgspec.Struct, frozen=True):
    """The processes below one process. Pages that several of them share count once each in ``rss_bytes``."""

    count: int
    rss_bytes: int
    cpu_cores: float | None  # processor seconds per second since the last reading; None for the first


class ProcessTree:
    """Figures of all descendants of a process. Walks every process of the node: read it rarely."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._before: dict[tuple[int, float], float] = {}
        self._at: float | None = None

    def read(self) -> TreeFigures | None:
        """None when the root is gone."""
        now = clock.monotonic()
        try:
            processes = psutil.Process(self._root).children(recursive=True)
        except (OSError, psutil.Error):
            return None
        cpu: dict[tuple[int, float], float] = {}
        rss = 0
        for process in processes:
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    rss += process.memory_info().rss
                    cpu[process.pid, process.create_time()] = times.user + times.system
            except (OSError, psutil.Error):
                continue  # it ended, or is another user's
        spent = sum(s - self._before.get(key, 0.0) for key, s in cpu.items())
        cores = None if self._at is None or now <= self._at else spent / (now - self._at)
        self._before, self._at = cpu, now
        return TreeFigures(len(cpu), rss, cores)
