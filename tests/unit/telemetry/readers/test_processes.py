"""The job's processes, from fake /proc trees and on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from clustertrain.telemetry.readers.processes import JobProcessReader

AGENT, TORCHRUN, RANK0, RANK1, WORKER, STRANGER = 10, 15, 20, 21, 30, 99
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Proc:
    """A fake /proc with one stat file per process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 0.0
        self.reader = JobProcessReader(AGENT, root, lambda: self.now)

    def put(self, pid: int, parent: int, cpu_s: float, waited_s: float = 0, mib: int = 1, state: str = "S") -> None:
        pages = mib * 2**20 // PAGE
        times = f"{int(cpu_s * TICKS)} 0 {int(waited_s * TICKS)} 0"
        rest = f"{state} {parent} 1 1 0 -1 4194560 0 0 0 0 {times} 20 0 4 0 12345 1000000 {pages} 18446744073709551615"
        (self.root / str(pid)).mkdir(exist_ok=True)
        (self.root / str(pid) / "stat").write_text(f"{pid} (a name) with) brackets) {rest} 0 0 0\n")

    def end(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))


def job(tmp_path: Path) -> Proc:
    proc = Proc(tmp_path)
    proc.put(1, 0, 5000)
    proc.put(AGENT, 1, 100, mib=50)
    proc.put(TORCHRUN, AGENT, 1, mib=10)
    proc.put(RANK0, TORCHRUN, 20, mib=1000)
    proc.put(RANK1, TORCHRUN, 30, mib=2000)
    proc.put(WORKER, RANK1, 7, mib=300)
    proc.put(STRANGER, 1, 9999, mib=9999)
    return proc


def test_usage_of_agent_and_ranks(tmp_path: Path) -> None:
    usage = job(tmp_path).reader.read({0: RANK0, 5: RANK1})
    assert usage is not None
    assert (usage.job.processes, usage.job.memory_bytes, usage.job.cpu_s) == (4, 3310 << 20, 58)
    assert {rank: (f.processes, f.memory_bytes >> 20, f.cpu_s) for rank, f in usage.ranks.items()} == {
        0: (1, 1000, 20),
        5: (2, 2300, 37),
    }


def test_cpu_time_does_not_fall_when_children_end(tmp_path: Path) -> None:
    proc = job(tmp_path)
    ranks = {1: RANK1}
    first = proc.reader.read(ranks)
    proc.end(WORKER)  # reaped by its parent
    proc.put(RANK1, TORCHRUN, 31, waited_s=8, mib=2000)
    second = proc.reader.read(ranks)
    proc.end(RANK0)  # its CPU time is lost
    third, fourth = proc.reader.read(ranks), proc.reader.read(ranks)
    proc.put(RANK1, TORCHRUN, 41, waited_s=8, mib=2000)
    last = proc.reader.read(ranks)
    assert first and second and third and fourth and last
    assert (first.ranks[1].cpu_s, second.ranks[1].cpu_s) == (37, 39)
    assert [f.job.cpu_s for f in (first, second, third, fourth, last)] == [58, 60, 60, 60, 70]


def test_missing_or_foreign_rank_has_no_usage(tmp_path: Path) -> None:
    proc = job(tmp_path)
    proc.end(RANK0)
    usage = proc.reader.read({0: RANK0, 1: STRANGER, 2: 0})
    assert usage is not None
    assert usage.ranks == {}


def test_unrelated_processes_are_read_once_per_minute(tmp_path: Path) -> None:
    proc = job(tmp_path)
    proc.reader.read()
    proc.put(STRANGER, AGENT, 1)  # its pid was reused by a process of the job
    proc.now = 10.0
    within = proc.reader.read()
    proc.now = 60.0
    later = proc.reader.read()
    assert within and later
    assert (within.job.processes, later.job.processes) == (4, 5)


def test_zombie_is_not_counted(tmp_path: Path) -> None:
    proc = job(tmp_path)
    proc.put(40, RANK0, 3, mib=0, state="Z")
    usage = proc.reader.read()
    assert usage is not None
    assert (usage.job.processes, usage.job.cpu_s) == (4, 61)


def test_missing_agent(tmp_path: Path) -> None:
    assert Proc(tmp_path).reader.read() is None


def test_usage_on_this_machine() -> None:
    reader = JobProcessReader(os.getpid())
    program = "import sys; print(sum(range(10**6)), flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        usage = reader.read({3: child.pid})
        child.kill()
    assert usage is not None
    assert usage.ranks[3].processes == 1
    assert usage.ranks[3].memory_bytes > 1 << 20
    assert usage.job.memory_bytes >= usage.ranks[3].memory_bytes
