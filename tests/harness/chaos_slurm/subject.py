"""A run that the storm hits: its log, its processes, its commands, all seen without the session's own files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from clustertrain import clock, fsio, settings
from clustertrain.cli.jobs import status_json
from clustertrain.run import attempts, events
from clustertrain.run.run_dir import RunDir
from clustertrain.run.state import FINAL
from clustertrain.scheduler.run_status import run_status
from tests.harness.chaos_slurm import testbed
from tests.harness.chaos_slurm.patience import wait_until
from tests.runs import CLI

SCRIPT = Path(__file__).with_name("script.py")
TOTAL = 300
PACE_S = 0.05
LIMIT = 120  # minutes
BEGIN_S = 240.0  # for a run to train after it was submitted
FINAL_S = 120.0  # for a run that has been cancelled or has lost its batch process
LOOK_S = 3.0  # between two questions to Slurm
COMMAND_S = 240.0  # of one of our commands; with slurmctld away they wait for it


@dataclass(frozen=True)
class Shape:
    nodes: int
    ranks: int  # a node

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


class Subject:
    def __init__(self, name: str, shape: Shape, home: Path, logs: Path) -> None:
        """Submits a run of this shape into ``home``; its ranks log into a folder of ``logs``."""
        self.shape, self.home = shape, home
        argv = ["--nodes", shape.nodes, "--gpus", shape.ranks, "--cpus-per-gpu", 1, "--layout", "ddp", "--name", name]
        argv += ["--time", LIMIT, "--max-requeues", 1000, "--sbatch", "exclusive"]
        done = self.call("submit", "--json", *map(str, argv), str(logs / SCRIPT.name), str(logs), str(TOTAL))
        if done.returncode:
            raise testbed.TestbedFailed(f"submit: {done.returncode}\n{done.stdout}{done.stderr}")
        submitted = json.loads(done.stdout)
        self.id, self.path = str(submitted["run"]), Path(submitted["run_dir"])
        self.run = RunDir(self.path)
        self.log = logs / self.id
        self.log.mkdir()

    # -- what it does

    def pace(self, seconds: float) -> None:
        fsio.write_text(self.log / "pace", str(seconds))

    def lines(self) -> list[dict[str, Any]]:
        """All lines of the ranks' logs; a rank that was killed may have cut its last one."""
        return read_lines(self.log)

    def attempt(self) -> int:
        """The newest one whose ranks have begun, or 0."""
        return max((_number(p) for p in self.log.glob("attempt-*")), default=0)

    def claimed(self) -> int:
        return max((a.n for a in self.run.attempts()), default=0)

    def last_step(self, attempt: int) -> dict[str, Any] | None:
        """The newest line of a step of that attempt, whichever rank's."""
        steps = [line for line in read_lines(self.log, attempt) if "step" in line]
        return max(steps, key=lambda line: line["end"], default=None)

    def committed(self) -> int:
        return max(self.run.committed_steps(), default=0)

    def commits(self) -> dict[int, list[dict[str, Any]]]:
        """The events of commits, by attempt."""
        logs = {a.n: events.for_attempt(a) for a in self.run.attempts()}
        return {n: list(events.filter_by_name(log, "checkpoint")) for n, log in logs.items()}

    def progressed(self) -> bool:
        """The newest attempt has done steps and committed one of them."""
        newest = self.attempt()
        if newest == 0 or newest < self.claimed():
            return False
        steps = [line["step"] for line in read_lines(self.log, newest) if "step" in line]
        return bool(steps) and self.committed() >= min(steps)

    def trains_or_ends(self) -> str:
        """Waits until it has progressed or is over; returns its state."""
        state, next_look = "unknown", 0.0

        def holds() -> bool:
            nonlocal state, next_look
            if not self.progressed() and clock.monotonic() < next_look:
                return False
            next_look, state = clock.monotonic() + LOOK_S, str(self.status()["state"])
            return self.progressed() or state in FINAL

        assert wait_until(holds, BEGIN_S), f"{self.id} is {state} and does not train"
        return state

    def status(self) -> dict[str, Any]:
        return status_json(run_status(self.run))

    def nodes(self) -> list[str]:
        """Of the newest attempt."""
        return list(attempts.load_attempt(self.run, self.run.attempt(self.claimed())).nodes)

    def excluded(self) -> bool:
        """A node was lost, which no later job of the run may have."""
        return "exclude" in attempts.load_submit_options(self.run)

    def job_id(self) -> str:
        return str(self.status()["job_id"])

    def wait_for_end(self) -> None:
        """Until the run is over, or another attempt has begun."""
        n = self.claimed()
        wait_until(lambda: self.claimed() > n or self.status()["state"] in FINAL, FINAL_S, 1.0)

    def job_ids(self) -> list[str]:
        return attempts.list_job_ids(self.run)

    # -- its processes

    def processes(self, *, attempt: int | None = None, node: str | None = None) -> list[psutil.Process]:
        """The living ones, by their environment."""
        return [p for p, env in processes_of(self.path) if _fits(env, attempt, node)]

    def named(self, what: str, node: str | None = None) -> list[psutil.Process]:
        """``batch``, ``agent``, ``rank``, ``torchrun`` or ``srun``."""
        found = [p for p in self.processes(node=node) if _is(p, what)]
        # A rank's own children look like it.
        return [p for p in found if _parent(p) not in {q.pid for q in found}]

    # -- its commands

    def start(self, *argv: str) -> subprocess.Popen[str]:
        return start(self.home, *argv)

    def call(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return finish(self.start(*argv))


def start(home: Path, *argv: str) -> subprocess.Popen[str]:
    env = {**os.environ, settings.HOME: str(home)}
    pipe = subprocess.PIPE
    return subprocess.Popen([*CLI, *argv], env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Its end; a command that does not come to one is killed, and its exit code is then that of the signal."""
    try:
        out, err = process.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nno end within {COMMAND_S:g} s"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def read_lines(folder: Path, attempt: int | None = None) -> list[dict[str, Any]]:
    pattern = f"attempt-{'*' if attempt is None else attempt}-rank-*.jsonl"
    return [line for path in sorted(folder.glob(pattern)) for line in fsio.read_jsonl(path)]


def _number(path: Path) -> int:
    return int(path.name.split("-")[1])


def processes_of(run: Path) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """The living processes that were started for a run, with their environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            env = process.environ()
            if env.get(settings.RUN_DIR) == str(run) and process.status() != psutil.STATUS_ZOMBIE:
                yield process, env


def _fits(env: dict[str, str], attempt: int | None, node: str | None) -> bool:
    if attempt is not None and env.get(settings.ATTEMPT) != str(attempt):
        return False
    return node is None or env.get(settings.SLURMD_NODENAME) == node


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None


def _is(process: psutil.Process, what: str) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    if what == "srun":
        return bool(words) and Path(words[0]).name == "srun"
    wanted = {
        "batch": ["-m", "clustertrain", "batch"],
        "agent": ["-m", "clustertrain", "agent"],
        "rank": ["-m", "clustertrain", "train"],
        "torchrun": ["torch.distributed.run"],  # behind agent/tied and its argument
    }[what]
    return any(words[i : i + len(wanted)] == wanted for i in range(1, 6))


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> list[int]:
    """The pids that were there to get it."""
    reached = []
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
            reached.append(process.pid)
    return reached
