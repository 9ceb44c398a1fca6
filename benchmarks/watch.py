"""Cost of `clustertrain watch` for the job that it watches, on four hosts of a Slurm cluster.

attach   `clustertrain watch JOB` from its start to the first complete report of all four nodes.
cpu      the samplers, each with eight stub GPUs at the default interval of 3 s: processor time per second of wall time,
         and resident memory, without their start. The stub answers at once; a driver adds its own time.
steps    steps of fixed work of one rank on a core of its own, with and without a sampler on that core, in groups of
         four turns: without, with, with, without. A drift of the core's speed cancels within a group.
cycles   attach and detach, 50 times: what is left of processes, steps and files on the nodes and in the job's folder.

On the testbed all hosts share the processors of this machine, so attach is slower than on a cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.cluster import Cluster, cluster
from benchmarks.measure import CannotRun
from benchmarks.telemetry import build_stub
from benchmarks.verdict import interval

HOSTS, GPUS = 4, 8
ATTACH_ROUNDS, CYCLES, GROUPS = 5, 50, 30
TURN_S, CPU_S, SETTLE_S = 4.0, 60.0, 15.0
TIMEOUT_S = 60.0
INTERVAL_S = 3.0  # the default of the command
_CLI = [sys.executable, "-m", "clustertrain", "watch"]

# A rank: steps of about 3 ms on one thread, each with its end and duration in a file, with or without a pause after
# each. It can have the machine's last core for itself.
_RANK = """
import os, sys, time
import numpy as np
folder, pause_s, own_core = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "own-core"
if own_core:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
a = np.random.default_rng(0).random((256, 256), dtype=np.float32)
with open(f"{folder}/steps-{os.environ['SLURM_PROCID']}", "w", buffering=1) as f:
    while True:
        began = time.perf_counter()
        for _ in range(8):
            a @ a
        f.write(f"{time.time()} {time.perf_counter() - began}\\n")
        if pause_s:
            time.sleep(pause_s)
"""


@dataclass(frozen=True)
class _Job:
    """A running job of one rank per host."""

    number: str
    hosts: int
    folder: Path
    cluster: Cluster
    env: dict[str, str]

    def list_steps(self) -> set[str]:
        """Return the ids of the job's steps."""
        argv = ["squeue", "-h", "-s", "-j", self.number, "-o", "%i"]
        return set(subprocess.run(argv, env=self.env, capture_output=True, text=True, check=True).stdout.split())

    def mean_step_s(self, start: float, end: float) -> float:
        """Return the mean step time of all ranks between two times (UTC s)."""
        seconds = []
        for path in self.folder.glob("steps-*"):
            rows = [line.split() for line in path.read_text().splitlines()[:-1]]
            seconds += [float(s) for t, s in rows if start <= float(t) < end]
        if not seconds:
            raise CannotRun("the ranks of the job did no step")
        return statistics.mean(seconds)


def main() -> int:
    result = measure.context(("clustertrain", "msgspec", "numpy", "nvidia-ml-py"))
    with tempfile.TemporaryDirectory(prefix="watch-benchmark-") as scratch, cluster() as slurm:
        result["cluster"] = {"name": slurm.name, "slurm": slurm.version, "hosts": HOSTS}
        with _running_job(slurm, Path(scratch, "job"), HOSTS) as job:
            result["attach"] = _measure_attach(job)
            result["cpu"] = _measure_cpu(job)
            result["cycles"] = _measure_cycles(job)
        # Ranks that compete for the cores of one machine would hide a difference of 1 %. So would pauses: a core that
        # is often idle changes its speed.
        with _running_job(slurm, Path(scratch, "one-rank"), 1, own_core=True) as job:
            result["steps"] = _measure_steps(job)
    return measure.write_with_targets("watch", result, check_targets(result))


def check_targets(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    values = [
        ("first report of 4 hosts: at most 5 s", result["attach"]["first_report_s"]["median"], 5.0),
        ("sampler of a node: at most 0.1 % of a core, as a share", result["cpu"]["cpu_s_per_wall_s"]["median"], 0.001),
        ("step time with a sampler on the rank's core: longer by at most", result["steps"]["interval"][1] - 1.0, 0.01),
        (f"left after {CYCLES} times attach and detach", float(len(result["cycles"]["left"])), 0.0),
    ]
    return [{"words": words, "value": value, "at_most": bound, "met": value <= bound} for words, value, bound in values]


@contextlib.contextmanager
def _running_job(slurm: Cluster, folder: Path, hosts: int, *, own_core: bool = False) -> Iterator[_Job]:
    folder.mkdir()
    stub = build_stub(folder)
    env = {**slurm.env, "CLUSTERTRAIN_HOME": str(folder / "home"), "PYTHONPATH": str(measure.ROOT)}
    env |= {"LD_LIBRARY_PATH": str(stub.folder), "NVML_STUB_DEVICES": str(GPUS), "OPENBLAS_NUM_THREADS": "1"}
    work, temporary = folder / "job", folder / "tmp"
    work.mkdir()
    temporary.mkdir()
    env["TMPDIR"] = str(temporary)
    (work / "rank.py").write_text(_RANK)
    arguments = "0 own-core" if own_core else "0.005 any-core"
    script = f"#!/bin/sh\nexec srun {sys.executable} rank.py {work} {arguments}\n"
    (work / "job.sh").write_text(script)
    options = [f"-N{hosts}", "--ntasks-per-node=1", f"--gres=gpu:{GPUS}", "--mem=4000", f"--chdir={work}", "-o", "out"]
    argv = ["sbatch", "--parsable", *options, str(work / "job.sh")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRun(f"sbatch refused the job: {done.stderr.strip()}")
    job = _Job(done.stdout.strip(), hosts, work, slurm, env)
    try:
        _wait(lambda: len(list(work.glob("steps-*"))) == hosts, "the ranks of the job")
        yield job
    finally:
        slurm.cancel(job.number)


def _wait(condition: Any, what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise CannotRun(f"not within {TIMEOUT_S:g} s: {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def _watching(job: _Job) -> Iterator[float]:
    """Watch the job with the command; yield the seconds until its first report of all nodes was complete."""
    began = time.perf_counter()
    argv = ["env", "--default-signal=INT", *_CLI, job.number]
    with subprocess.Popen(argv, env=job.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None and command.stderr is not None
        rows: list[str] = []  # each node has its first GPU in one table, and itself in the next
        while len(rows) < 2 * job.hosts:
            line = command.stdout.readline()
            if not line:
                raise CannotRun(f"watch failed: {command.stderr.read().strip()[-500:]}")
            rows += [line.split()[0]] if line.startswith("node0") else []
        first_report_s = time.perf_counter() - began
        try:
            if len(set(rows)) != job.hosts:
                raise CannotRun(f"the first report has only {', '.join(sorted(set(rows)))}")
            yield first_report_s
        finally:
            command.send_signal(signal.SIGINT)
            command.communicate(timeout=TIMEOUT_S)


def _measure_attach(job: _Job) -> dict[str, Any]:
    seconds = []
    for _ in range(ATTACH_ROUNDS):
        with _watching(job) as first_report_s:
            seconds.append(first_report_s)
    return {"rounds": ATTACH_ROUNDS, "gpus": HOSTS * GPUS, "first_report_s": measure.spread(seconds)}


def _list_samplers(job: _Job) -> list[int]:
    """Return the pids of the job's samplers on the nodes, which on the testbed are all on this machine."""
    home = job.env["CLUSTERTRAIN_HOME"].encode()
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            argv = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if b"watch-node" in argv and b"--overlap" not in argv and any(home in word for word in argv):
                found.append(int(folder.name))
    return found


def _cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024 / 1e6


def _measure_cpu(job: _Job) -> dict[str, Any]:
    with _watching(job):
        time.sleep(SETTLE_S)
        pids = _list_samplers(job)
        before, wall = {pid: _cpu_s(pid) for pid in pids}, time.monotonic()
        time.sleep(CPU_S)
        seconds = time.monotonic() - wall
        shares = [(_cpu_s(pid) - before[pid]) / seconds for pid in pids]
        memory_mb = [_rss_mb(pid) for pid in pids]
    if len(shares) != HOSTS:
        raise CannotRun(f"{len(shares)} samplers run, not {HOSTS}")
    spread = {k: round(v, 6) for k, v in zip(("median", "min", "max"), _spread(shares), strict=True)}
    return {
        "gpus_of_a_node": GPUS,
        "interval_s": INTERVAL_S,
        "wall_s": round(seconds, 1),
        "processes_on_the_machine": sum(p.name.isdigit() for p in Path("/proc").iterdir()),
        "cpu_s_per_wall_s": spread,
        "memory_mb": measure.spread(memory_mb),
    }


def _spread(values: list[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def _measure_steps(job: _Job) -> dict[str, Any]:
    """Return the ratio of the mean step time with a sampler to that without, over groups of turns."""
    ratios, alone = [], []
    for _ in range(GROUPS):
        before = _measure_turn(job, TURN_S)
        with _watching(job):
            _move_to_core_of_rank(_list_samplers(job))
            watched = _measure_turn(job, 2 * TURN_S)
        after = _measure_turn(job, TURN_S)
        alone += [before, after]
        ratios.append(watched / statistics.mean((before, after)))
    low, high = interval(ratios)
    return {
        "groups": GROUPS,
        "turn_s": TURN_S,
        "step_s": round(statistics.median(alone), 6),
        "ratio": round(statistics.median(ratios), 5),
        "interval": [round(low, 5), round(high, 5)],
        "between_turns_alone": round(statistics.stdev(alone) / statistics.mean(alone), 5),
    }


def _measure_turn(job: _Job, seconds: float) -> float:
    start = time.time()
    time.sleep(seconds)
    return job.mean_step_s(start, time.time())


def _move_to_core_of_rank(pids: list[int]) -> None:
    """Let the samplers run only where the rank runs, as on a node whose ranks use all cores."""
    if not pids:
        raise CannotRun("no sampler runs")
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {max(os.sched_getaffinity(0))})


def _measure_cycles(job: _Job) -> dict[str, Any]:
    """Attach and detach; return what is left."""
    files, temporary = _list_files(job.folder), Path(job.env["TMPDIR"])
    steps, began = job.list_steps(), time.perf_counter()
    argv = [sys.executable, "-m", "benchmarks.watch", job.number]
    subprocess.run(argv, env=job.env, cwd=measure.ROOT, check=True, timeout=CYCLES * TIMEOUT_S)
    seconds = time.perf_counter() - began
    with contextlib.suppress(CannotRun):
        _wait(lambda: job.list_steps() == steps, "the end of the steps")
    left = [*map(str, _list_samplers(job)), *sorted(job.list_steps() - steps), *map(str, temporary.iterdir())]
    left += sorted(_list_files(job.folder) - files)
    runs = list((Path(job.env["CLUSTERTRAIN_HOME"]) / "runs").iterdir())
    return {"cycles": CYCLES, "mean_s": round(seconds / CYCLES, 2), "left": left, "run_folders": len(runs)}


def _list_files(folder: Path) -> set[str]:
    return {str(p) for p in folder.rglob("*")}


def run_cycles(number: str) -> None:
    """Attach to a job and detach, without the reports."""
    from clustertrain.watch import target
    from clustertrain.watch.session import WatchOptions, WatchSession

    for _ in range(CYCLES):
        session = WatchSession(target.find_job(number), WatchOptions())
        session.open()
        session.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_cycles(sys.argv[1])
        sys.exit(0)
    sys.exit(main())
