"""A run of the storm: its log, processes and commands, observed without the session's own files."""

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
from clustertrain.run import attempts, events
from clustertrain.run.run_dir import RunDir
from clustertrain.run.state import FINAL
from tests.harness.chaos_slurm import testbed
from tests.harness.chaos_slurm.waiting import wait_until
from tests.runs import CLI, describe_status

SCRIPT = Path(__file__).with_name("script.py")
TOTAL = 300
PACE_S = 0.05
LIMIT = 120  # minutes
START_TIMEOUT_S = 240.0  # for a submitted run to train
END_TIMEOUT_S = 120.0  # for a run that was cancelled or lost its batch process
QUERY_INTERVAL_S = 3.0  # between two queries of Slurm
COMMAND_TIMEOUT_S = 240.0  # for a clustertrain command, which waits for slurmctld


@dataclass(frozen=True)
class Shape:
    nodes: int
    ranks: int  # per node

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


class Subject:
    def __init__(self, name: str, shape: Shape, home: Path, logs: Path) -> None:
        """Submit a run of this shape into ``home``; its ranks log into a subfolder of ``logs``."""
        self.shape, self.home = shape, home
        argv = ["--nodes", shape.nodes, "--gpus", shape.ranks, "--cpus-per-gpu", 1, "--layout", "ddp", "--name", name]
        argv += ["--time", LIMIT, "--max-requeues", 1000, "--sbatch", "exclusive"]
        result = self.call("submit", "--json", *map(str, argv), str(logs / SCRIPT.name), str(logs), str(TOTAL))
        if result.returncode:
            raise testbed.TestbedFailed(f"submit: {result.returncode}\n{result.stdout}{result.stderr}")
        submitted = json.loads(result.stdout)
        self.id, self.path = str(submitted["run"]), Path(submitted["run_dir"])
        self.run = RunDir(self.path)
        self.log = logs / self.id
        self.log.mkdir()

    # -- progress

    def pace(self, seconds: float) -> None:
        fsio.write_text(self.log / "pace", str(seconds))

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines of the ranks' logs, without a last line that a kill has truncated."""
        return read_lines(self.log)

    def attempt(self) -> int:
        """Return the newest attempt whose ranks have started, or 0."""
        return max((_number(p) for p in self.log.glob("attempt-*")), default=0)

    def claimed(self) -> int:
        return max((a.n for a in self.run.attempts()), default=0)

    def last_step(self, attempt: int) -> dict[str, Any] | None:
        """Return the newest step line of any rank of ``attempt``."""
        steps = [line for line in read_lines(self.log, attempt) if "step" in line]
        return max(steps, key=lambda line: line["end"], default=None)

    def committed(self) -> int:
        return max(self.run.committed_steps(), default=0)

    def commits(self) -> dict[int, list[dict[str, Any]]]:
        """Return the checkpoint events by attempt."""
        logs = {a.n: events.for_attempt(a) for a in self.run.attempts()}
        return {n: list(events.filter_by_name(log, "checkpoint")) for n, log in logs.items()}

    def progressed(self) -> bool:
        """Return whether the newest attempt has trained and committed a step."""
        newest = self.attempt()
        if newest == 0 or newest < self.claimed():
            return False
        steps = [line["step"] for line in read_lines(self.log, newest) if "step" in line]
        return bool(steps) and self.committed() >= min(steps)

    def wait_until_training_or_ended(self) -> str:
        """Wait until the run has progressed or ended, and return its state."""
        state, next_query = "unknown", 0.0

        def is_settled() -> bool:
            nonlocal state, next_query
            if not self.progressed() and clock.monotonic() < next_query:
                return False
            next_query, state = clock.monotonic() + QUERY_INTERVAL_S, str(self.status()["state"])
            return self.progressed() or state in FINAL

        assert wait_until(is_settled, START_TIMEOUT_S), f"{self.id} is {state} and does not train"
        return state

    def status(self) -> dict[str, Any]:
        return describe_status(self.run)

    def nodes(self) -> list[str]:
        """Return the nodes of the newest attempt."""
        return list(attempts.load_attempt(self.run, self.run.attempt(self.claimed())).nodes)

    def excluded(self) -> bool:
        """Return whether a lost node is excluded from later jobs of the run."""
        return "exclude" in attempts.load_submit_options(self.run)

    def job_id(self) -> str:
        return str(self.status()["job_id"])

    def wait_for_end(self) -> None:
        """Wait until the run has ended or another attempt has started."""
        n = self.claimed()
        wait_until(lambda: self.claimed() > n or self.status()["state"] in FINAL, END_TIMEOUT_S, 1.0)

    def job_ids(self) -> list[str]:
        return attempts.list_job_ids(self.run)

    # -- processes

    def processes(self, *, attempt: int | None = None, node: str | None = None) -> list[psutil.Process]:
        """Return the living processes of the run, identified by their environment."""
        return [p for p, env in processes_of(self.path) if _fits(env, attempt, node)]

    def named(self, role: str, node: str | None = None) -> list[psutil.Process]:
        """Return the processes of one role: ``batch``, ``agent``, ``rank``, ``torchrun`` or ``srun``."""
        matches = [p for p in self.processes(node=node) if _is(p, role)]
        # Children of a rank have the same command line.
        return [p for p in matches if _parent(p) not in {q.pid for q in matches}]

    # -- commands

    def start(self, *argv: str) -> subprocess.Popen[str]:
        return start(self.home, *argv)

    def call(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return finish(self.start(*argv))


def start(home: Path, *argv: str) -> subprocess.Popen[str]:
    env = {**os.environ, settings.HOME: str(home)}
    pipe = subprocess.PIPE
    return subprocess.Popen([*CLI, *argv], env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for a command; if it does not end in time, kill it, which determines its exit code."""
    try:
        out, err = process.communicate(timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\ntimed out after {COMMAND_TIMEOUT_S:g} s"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def read_lines(folder: Path, attempt: int | None = None) -> list[dict[str, Any]]:
    pattern = f"attempt-{'*' if attempt is None else attempt}-rank-*.jsonl"
    return [line for path in sorted(folder.glob(pattern)) for line in fsio.read_jsonl(path)]


def _number(path: Path) -> int:
    return int(path.name.split("-")[1])


def processes_of(run: Path) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Iterate over the living processes of a run and their environments."""
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


def _is(process: psutil.Process, role: str) -> bool:
    try:
        argv = process.cmdline()
    except psutil.Error:
        return False
    if role == "srun":
        return bool(argv) and Path(argv[0]).name == "srun"
    expected = {
        "batch": ["-m", "clustertrain", "batch"],
        "agent": ["-m", "clustertrain", "agent"],
        "rank": ["-m", "clustertrain", "train"],
        "torchrun": ["torch.distributed.run"],  # after agent/ranks/die_with_parent and its argument
    }[role]
    return any(argv[i : i + len(expected)] == expected for i in range(1, 6))


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> list[int]:
    """Send a signal and return the pids that it reached."""
    reached = []
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
            reached.append(process.pid)
    return reached
