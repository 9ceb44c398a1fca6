"""Usage of the job's processes on this node: all descendants of the agent, and those of each rank.

Reads ``/proc`` directly: psutil takes about ten times as long, and a node has a thousand unrelated processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from clustertrain import clock

_RESCAN_S = 60.0  # the kernel reuses process ids
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class _Process(msgspec.Struct, frozen=True):
    """One process; ``cpu_s`` includes the children that it has waited for."""

    parent: int
    cpu_s: float
    rss_bytes: int
    is_zombie: bool
    identity: tuple[bytes, bytes]
    """Name and start time, of which a program that replaces another one changes the first."""


class ProcessUsage(msgspec.Struct, frozen=True):
    """Usage of a group of processes."""

    processes: int
    memory_bytes: int
    """Resident memory; pages shared by several processes count once for each, so the sum is never too low."""
    cpu_s: float
    """Processor time, including ended processes, so it never falls. Only differences are meaningful."""


class JobUsage(msgspec.Struct, frozen=True):
    """Usage of the job on this node."""

    job: ProcessUsage
    ranks: dict[int, ProcessUsage]
    """By rank, its process and its descendants (data workers, compilers); only ranks whose process exists."""


class JobProcessReader:
    """Reader of the usage of all descendants of a process. A reading scans every process of the node.

    Args:
        root: process id of the agent, which itself does not count.
        proc: mount point of procfs.
        now: monotonic clock.
    """

    def __init__(self, root: int, proc: Path = Path("/proc"), now: Callable[[], float] = clock.monotonic) -> None:
        self._root = root
        self._proc = proc
        self._now = now
        self._unrelated_pids: set[int] = set()  # not descendants of the root
        self._rescan_at = now() + _RESCAN_S
        self._cpu_totals: dict[int | None, _MonotonicTotal] = {}

    def read(self, ranks: Mapping[int, int] | None = None) -> JobUsage | None:
        """Return the current usage; None if the root process is gone.

        Args:
            ranks: process id of each rank, from its heartbeat.
        """
        self._is_rescan_due()
        processes: dict[int, _Process] = {}
        root = self._read_process(self._root)
        if root is None:
            return None
        for pid in self._list_pids():
            if (
                pid not in self._unrelated_pids
                and pid != self._root
                and (process := self._read_process(pid)) is not None
            ):
                processes[pid] = process
        children: dict[int, list[int]] = {}
        for pid, process in processes.items():
            children.setdefault(process.parent, []).append(pid)
        descendants = find_descendants(self._root, children)
        self._unrelated_pids |= processes.keys() - descendants
        # The root's time does not count for the job, but the time of its ended children does.
        job = self._sum_usage(None, (processes[p] for p in descendants), self._ended_children_s())
        rank_usage = {}
        for rank, pid in (ranks or {}).items():
            if pid in descendants:
                rank_usage[rank] = self._sum_usage(
                    rank, (processes[p] for p in {pid} | find_descendants(pid, children))
                )
        return JobUsage(job, rank_usage)

    def _is_rescan_due(self, interval_s: float = _RESCAN_S) -> bool:
        """Return whether all processes have to be looked at again, and forget the unrelated ones if so."""
        is_due = self._now() >= self._rescan_at
        if is_due:
            self._unrelated_pids.clear()
            self._rescan_at = self._now() + interval_s
        return is_due

    def _sum_usage(self, key: int | None, processes: Iterable[_Process], extra_s: float = 0.0) -> ProcessUsage:
        count, rss, cpu_s = 0, 0, extra_s
        for process in processes:
            count += not process.is_zombie
            rss += process.rss_bytes
            cpu_s += process.cpu_s
        return ProcessUsage(count, rss, self._cpu_totals.setdefault(key, _MonotonicTotal()).update(cpu_s))

    def _list_pids(self) -> list[int]:
        try:
            with os.scandir(self._proc) as entries:
                return [int(entry.name) for entry in entries if entry.name.isdigit()]
        except OSError:
            return []

    def _read_process(self, pid: int) -> _Process | None:
        found = self._read_stat(pid)
        if found is None:
            return None
        name, stat = found
        # Fields of proc_pid_stat(5) without the first two: 1 ppid, 11 to 14 user and system time of the process and of
        # its waited-for children, 19 start time, 21 resident pages.
        ticks = int(stat[11]) + int(stat[12]) + int(stat[13]) + int(stat[14])
        rss_bytes = int(stat[21]) * _PAGE_BYTES
        return _Process(int(stat[1]), ticks / _TICKS_PER_S, rss_bytes, stat[0] == b"Z", (name, stat[19]))

    def _ended_children_s(self) -> float:
        found = self._read_stat(self._root)
        return 0.0 if found is None else (int(found[1][13]) + int(found[1][14])) / _TICKS_PER_S

    def _read_stat(self, pid: int) -> tuple[bytes, list[bytes]] | None:
        """Return the name of a process and its other fields."""
        try:
            fd = os.open(f"{self._proc}/{pid}/stat", os.O_RDONLY)
        except OSError:
            return None  # it has ended
        try:
            text = os.read(fd, 4096)
        except OSError:
            return None
        finally:
            os.close(fd)
        # The name, in parentheses, may contain any character.
        name, _, rest = text.rpartition(b")")
        fields = rest.split()
        return (name, fields) if len(fields) > 21 else None


class _MonotonicTotal:
    """Total that does not fall when a process ends without a parent that waits for it.

    A single fall is ignored: the reading may lie between a child's end and its parent's wait.
    """

    def __init__(self) -> None:
        self._highest = 0.0
        self._left_behind = 0.0
        self._fell = False

    def update(self, value: float) -> float:
        """Return the total after a new sum over the existing processes."""
        value += self._left_behind
        if value < self._highest and self._fell:
            self._left_behind += self._highest - value
            value = self._highest
        self._fell = value < self._highest
        self._highest = max(self._highest, value)
        return self._highest


def find_descendants(root: int, children: Mapping[int, list[int]]) -> set[int]:
    descendants: set[int] = set()
    pending = list(children.get(root, ()))
    while pending:
        pid = pending.pop()
        descendants.add(pid)
        pending.extend(children.get(pid, ()))
    return descendants
