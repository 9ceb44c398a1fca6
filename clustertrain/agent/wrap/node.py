"""The agent of a node below ``clustertrain wrap``, and what the nodes of a step know of each other.

The step is started by the user's own srun. So each node's first task starts the node's agent, reports its end in
the attempt's folder, and exits only when the first task of the step has decided about the run: srun may end the others
when one exits (``--wait``, ``--kill-on-bad-exit``).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from clustertrain import clock, fsio, proc, settings
from clustertrain.agent.node_agent import RENDEZVOUS_TIMEOUT_S
from clustertrain.agent.signals import Signals
from clustertrain.errors import EXIT_FAILED, ClusterTrainError, UnsuitableEnvironment
from clustertrain.run import json_files, run_dir
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.scheduler.slurm_step import StepTask
from clustertrain.submit.wrapped_run import make_job_folder

POLL_S = 1.0
START_S = RENDEZVOUS_TIMEOUT_S
# From the end of a node's agent to the decision: the other agents may compact telemetry, and Slurm may not answer.
DECISION_S = 1200.0
_EXIT = "exit.json"


class StepStart(msgspec.Struct, frozen=True, kw_only=True):
    """What the first task of a step publishes for the other nodes, in the job's folder of ``wrapped``."""

    run: str = ""
    """Id of the run; empty if the step executes none."""
    attempt: int = 0
    exit_code: int = EXIT_FAILED
    """Exit code of the step without a run."""


def _start_path(task: StepTask) -> Path:
    return make_job_folder(task) / f"start-{task.restart}-{task.step}.json"


def publish_start(task: StepTask, start: StepStart) -> None:
    """Publish on the first node what the step executes."""
    fsio.write_json(_start_path(task), msgspec.to_builtins(start))


def wait_for_start(task: StepTask) -> StepStart:
    """Return what the step executes, on another node than the first.

    Raises:
        UnsuitableEnvironment: the first task has published nothing, or in a folder that this node does not see.
    """
    path, found = _start_path(task), list[StepStart]()

    def try_read() -> bool:
        start = json_files.convert_leniently(fsio.poll_json(path), StepStart)
        if start is not None and (not start.run or (run_dir.runs_folder() / start.run).is_dir()):
            found.append(start)
        return bool(found)

    if not clock.wait_until(try_read, START_S, POLL_S):
        raise UnsuitableEnvironment(
            f"node {task.node}: the first task, on {task.nodes[0]}, has not started a run in {START_S:g} s, or this "
            f"node does not see {path}",
            fix=f"see its output above; set {settings.HOME} to a filesystem that all nodes mount at the same path",
        )
    return found[0]


def start_agent(task: StepTask, run: RunDir, attempt: AttemptDir) -> subprocess.Popen[bytes]:
    """Start the agent of this node. The kernel ends it with this process."""
    env = {
        **os.environ,
        settings.ATTEMPT: str(attempt.n),
        settings.NONCE: attempt.nonce.read_text(),
        settings.NODE_LIST: ",".join(task.nodes),
        settings.NODE: task.node,
        settings.NODE_RANK: str(task.node_rank),
        settings.WRAP_PID: str(os.getpid()),
    }
    return proc.start(["/bin/bash", run.job_script], env=env)


def report_agent_end(task: StepTask, run: RunDir, attempt: AttemptDir, code: int) -> None:
    """Report that the agent of this node has ended, and tidy up after one that was killed."""
    env = {
        **os.environ,
        settings.RUN_DIR: str(run.path),
        settings.ATTEMPT: str(attempt.n),
        settings.NODE: task.node,
    }
    with contextlib.suppress(ClusterTrainError, OSError):
        proc.run([run.agent_end_script], env=env, check=False)
    with contextlib.suppress(OSError):
        attempt.wrap.mkdir(exist_ok=True)
        fsio.write_json(attempt.wrap / f"{task.node}.json", {"exit_code": code})


def report_exit(attempt: AttemptDir, code: int) -> None:
    """Report that the attempt is over, for the other nodes."""
    with contextlib.suppress(OSError):
        attempt.wrap.mkdir(exist_ok=True)
        fsio.write_json(attempt.wrap / _EXIT, {"exit_code": code})


class StepAgents:
    """The agents of all nodes, with the interface of the step launcher that the batch process otherwise starts."""

    def __init__(self, task: StepTask, run: RunDir, attempt: AttemptDir) -> None:
        self.returncode: int | None = None
        self._task, self._run, self._attempt = task, run, attempt
        self._agent = start_agent(task, run, attempt)
        self._own_code: int | None = None
        self._killed = False
        self._next_check = 0.0

    def poll(self) -> int | None:
        """Return None while an agent runs, otherwise the first exit code that is not 0."""
        if self.returncode is not None or self._agent.poll() is None:
            return self.returncode
        if self._own_code is None:
            self._own_code = to_exit_code(self._agent.returncode)
            report_agent_end(self._task, self._run, self._attempt, self._own_code)
        if clock.monotonic() < self._next_check:
            return None
        self._next_check = clock.monotonic() + POLL_S
        codes = [
            self._own_code,
            *(_read_exit_code(self._attempt.wrap / f"{node}.json") for node in self._task.nodes[1:]),
        ]
        if self._killed or None not in codes:
            self.returncode = next((code for code in codes if code), 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal the agent of this node. The other ones read the stop request from the attempt's folder."""
        self._agent.send_signal(number)

    def kill(self) -> None:
        """Kill the agent of this node, and no longer wait for the others."""
        self._killed = True
        self._agent.kill()


def to_exit_code(returncode: int) -> int:
    """Return the exit code that srun would print for a task."""
    return 128 - returncode if returncode < 0 else returncode


def _read_exit_code(path: Path) -> int | None:
    document: Any = fsio.poll_json(path)
    code = document.get("exit_code") if isinstance(document, dict) else None
    return code if isinstance(code, int) else None


def run_node(task: StepTask, signals: Signals) -> int:
    """Run the agent of a node other than the first, and return the exit code that the first task has reported.

    The agent gets Slurm's signals itself, or reads the stop request of the first task.

    Raises:
        UnsuitableEnvironment: the first task has started no run that this node sees.
    """
    start = wait_for_start(task)
    if not start.run:
        return start.exit_code
    run = RunDir(run_dir.runs_folder() / start.run)
    attempt = run.attempt(start.attempt)
    fsio.set_group_umask(run.path)
    code = to_exit_code(start_agent(task, run, attempt).wait())
    report_agent_end(task, run, attempt, code)
    exit_codes: list[int] = []

    def is_over() -> bool:
        exit_code = _read_exit_code(attempt.wrap / _EXIT)
        exit_codes.extend([] if exit_code is None else [exit_code])
        return bool(exit_codes)

    clock.wait_until(is_over, DECISION_S, POLL_S)
    return exit_codes[0] if exit_codes else code
