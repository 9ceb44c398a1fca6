"""Processes on this node of a job that was started without clustertrain: their usage, and which of them are ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from clustertrain import clock, reading
from clustertrain.telemetry.readers.processes import JobProcessReader, JobUsage, find_descendants
from clustertrain.telemetry.readers.rank_environment import (
    JOB_ID,
    NODE,
    FoundRank,
    JobProcess,
    find_ranks,
    parse_environ,
)

RESCAN_S = 300.0  # until a process that was not of the job is looked at again; it takes some milliseconds
_MAX_ENVIRON_BYTES = 4 << 20


class WatchedJobReader(JobProcessReader):
    """Reader of the usage of all processes of a Slurm job, except this process, which may be in the same job.

    A process belongs to the job if its environment or its cgroup names the job, or if it descends from such a process.
    Only the processes of this user are considered.

    Args:
        job: the job's number, as in ``SLURM_JOB_ID``.
        node: Slurm's name of this node, as in ``SLURMD_NODENAME``; empty if unknown. Slurm may run several nodes on
            one machine.
        uid: the user whose processes count.
    """

    def __init__(
        self,
        job: str,
        proc: Path = Path("/proc"),
        now: Callable[[], float] = clock.monotonic,
        *,
        node: str = "",
        uid: int | None = None,
        own_pid: int | None = None,
    ) -> None:
        super().__init__(os.getpid() if own_pid is None else own_pid, proc, now)
        self._job, self._node = job, node
        self._uid = os.geteuid() if uid is None else uid
        self._cgroup = re.compile(rb"/job_%d(?:/|$)" % int(job), re.MULTILINE)
        # By pid: what identified the process when its environment was read, and the variables; None: not of the job.
        self._environs: dict[int, tuple[tuple[bytes, bytes], dict[str, str] | None]] = {}
        self.ranks: list[FoundRank] = []
        """The ranks that the last reading has found, ordered by number."""

    def read(self, ranks: Mapping[int, int] | None = None) -> JobUsage | None:
        """Return the current usage, also of each rank that is found; ``ranks`` adds nothing."""
        self._forget_unrelated()
        processes = {}
        pids = self._list_pids()
        self._unrelated_pids.intersection_update(pids)  # the kernel may give the number of one that ended to a rank
        for pid in pids:
            if pid in self._unrelated_pids or pid == self._root:
                continue
            if pid not in self._environs and not self._is_own(pid):
                self._unrelated_pids.add(pid)
            elif (process := self._read_process(pid)) is not None:
                processes[pid] = process
        children: dict[int, list[int]] = {}
        for pid, process in processes.items():
            children.setdefault(process.parent, []).append(pid)
            self._read_environ(pid, process.identity)
        roots = {pid for pid in processes if self._environs[pid][1] is not None}
        members = roots.union(*(find_descendants(pid, children) for pid in roots))
        self._unrelated_pids |= processes.keys() - members
        self._environs = {pid: self._environs[pid] for pid in members}
        self.ranks = find_ranks(
            [JobProcess(pid, processes[pid].parent, self._environs[pid][1] or {}) for pid in members]
        )
        job = self._sum_usage(None, (processes[pid] for pid in members))
        usage = {
            r.rank: self._sum_usage(r.rank, (processes[p] for p in {r.pid} | find_descendants(r.pid, children)))
            for r in self.ranks
        }
        return JobUsage(job, usage)

    def _forget_unrelated(self) -> None:
        """Look at all processes again from time to time, as a process may start another program."""
        if self._is_rescan_due(RESCAN_S):
            self._environs.clear()

    def _is_own(self, pid: int) -> bool:
        try:
            return (self._proc / str(pid)).stat().st_uid == self._uid
        except OSError:
            return False

    def _read_environ(self, pid: int, identity: tuple[bytes, bytes]) -> None:
        known = self._environs.get(pid)
        if known is not None and known[0] == identity:
            return
        environ = parse_environ(self._read_file(pid, "environ"))
        # A program that changes its title may overwrite its environment.
        belongs = environ.get(JOB_ID) == self._job
        if not belongs and JOB_ID not in environ:
            belongs = self._cgroup.search(self._read_file(pid, "cgroup")) is not None
        if self._node and environ.get(NODE, self._node) != self._node:
            belongs = False
        self._environs[pid] = identity, environ if belongs else None

    def _read_file(self, pid: int, name: str) -> bytes:
        try:
            return reading.read_bytes(self._proc / str(pid) / name, _MAX_ENVIRON_BYTES)
        except OSError:  # it has ended, or may not be read
            return b""
