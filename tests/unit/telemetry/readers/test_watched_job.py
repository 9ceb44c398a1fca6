"""The processes of a job that was started without clustertrain, from a fake /proc tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from clustertrain import clock
from clustertrain.telemetry.readers.watched_job import WatchedJobReader

TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
OWN, STEPD, SCRIPT, RANK, WORKER, SHELL, OTHER_JOB = 5, 10, 20, 30, 40, 50, 60
TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


class Tree:
    """A fake /proc with stat, environ and cgroup of each process."""

    def __init__(self, root: Path, node: str = "") -> None:
        self.root = root
        self.now = 0.0
        self.reader = WatchedJobReader("7", root, lambda: self.now, own_pid=OWN, node=node)

    def put(
        self,
        pid: int,
        parent: int,
        environ: dict[str, str] | None = None,
        *,
        cgroup: str = "0::/user.slice",
        name: str = "python",
        cpu_s: float = 1,
    ) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        pages = (100 << 20) // PAGE
        rest = f"S {parent} 1 1 0 -1 0 0 0 0 0 {int(cpu_s * TICKS)} 0 0 0 20 0 4 0 12345 1000000 {pages} 1"
        (folder / "stat").write_text(f"{pid} ({name}) {rest} 0 0 0\n")
        (folder / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in (environ or {}).items()))
        (folder / "cgroup").write_text(cgroup + "\n")


def make_tree(tmp_path: Path, node: str = "") -> Tree:
    tree = Tree(tmp_path, node)
    tree.put(OWN, STEPD, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3"})
    tree.put(STEPD, 1)
    tree.put(SCRIPT, STEPD, {"SLURM_JOB_ID": "7"})
    tree.put(RANK, STEPD, TASK, cpu_s=20)
    tree.put(WORKER, RANK, TASK, cpu_s=3)
    tree.put(SHELL, 1)
    tree.put(OTHER_JOB, 1, {**TASK, "SLURM_JOB_ID": "8"})
    return tree


def test_job_and_its_ranks(tmp_path: Path) -> None:
    usage = make_tree(tmp_path).reader.read()
    assert usage is not None
    assert (usage.job.processes, usage.job.memory_bytes >> 20, usage.job.cpu_s) == (3, 300, 24)
    assert {rank: (u.processes, u.cpu_s) for rank, u in usage.ranks.items()} == {1: (2, 23)}


def test_child_without_environment_belongs_to_its_parent(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    tree.put(WORKER, RANK, {})
    tree.put(41, WORKER, {})
    usage = tree.reader.read()
    assert usage is not None and usage.job.processes == 4 and usage.ranks[1].processes == 3


def test_process_that_overwrote_its_environment_is_found_by_its_cgroup(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    tree.put(70, STEPD, {}, cgroup="0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0")
    tree.put(71, STEPD, {}, cgroup="0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0")
    usage = tree.reader.read()
    assert usage is not None and usage.job.processes == 4


def test_program_that_replaces_its_shell_becomes_a_rank(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    tree.put(RANK, STEPD, {"SLURM_JOB_ID": "7"}, name="bash")
    tree.put(WORKER, RANK, {"SLURM_JOB_ID": "7"}, name="sleep")
    tree.reader.read()
    assert tree.reader.ranks == []
    tree.put(RANK, STEPD, {"SLURM_JOB_ID": "7", "RANK": "0", "WORLD_SIZE": "1"})
    tree.reader.read()
    assert [(r.rank, r.pid) for r in tree.reader.ranks] == [(0, RANK)]


def test_number_of_an_ended_process_may_become_a_rank(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    tree.reader.read()
    shutil.rmtree(tree.root / str(SHELL))
    tree.reader.read()
    tree.put(SHELL, STEPD, {**TASK, "SLURM_PROCID": "0"})
    tree.reader.read()
    assert [r.rank for r in tree.reader.ranks] == [0, 1]


def test_unrelated_process_is_looked_at_again_after_minutes(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    tree.reader.read()
    tree.put(SHELL, 1, TASK)
    usage = tree.reader.read()
    assert usage is not None and usage.job.processes == 3
    tree.now = 601.0
    usage = tree.reader.read()
    assert usage is not None and usage.job.processes == 4


def test_processes_of_other_users_do_not_count(tmp_path: Path) -> None:
    make_tree(tmp_path)
    reader = WatchedJobReader("7", tmp_path, clock.monotonic, own_pid=OWN, uid=os.geteuid() + 1)
    usage = reader.read()
    assert usage is not None and usage.job.processes == 0 and reader.ranks == []


def test_processes_of_another_node_on_the_same_machine_do_not_count(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, node="node02")
    tree.put(RANK, STEPD, {**TASK, "SLURMD_NODENAME": "node01"})
    tree.put(WORKER, RANK, {**TASK, "SLURMD_NODENAME": "node01"})
    usage = tree.reader.read()
    assert usage is not None and usage.job.processes == 1 and usage.ranks == {}


def test_process_of_this_machine() -> None:
    environ = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "987654", "RANK": "3", "WORLD_SIZE": "4"}
    program = "import sys; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", program], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child:
        child.stdout.readline()
        reader = WatchedJobReader("987654")
        usage = reader.read()
        child.communicate()
    assert usage is not None and usage.job.processes == 1
    assert [(r.rank, r.world_size, r.pid) for r in reader.ranks] == [(3, 4, child.pid)]
    assert usage.ranks[3].memory_bytes > 1 << 20
