"""A training that is interrupted: a run of clustertrain, or the same program in a plain batch script."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol
from unittest import mock

import psutil

from clustertrain import clock
from clustertrain.cli.main import cli
from clustertrain.errors import ClusterTrainError
from clustertrain.run.state import FINAL
from tests import runs
from tests.harness.chaos_slurm import testbed
from tests.harness.interruptions.programs import RANKS, TOTAL, Program
from tests.harness.interruptions.steps import Steps, read_steps

_ONE_NODE, _TWO_NODES = ("--nodes", "1", "--gpus", str(RANKS)), ("--nodes", str(RANKS), "--gpus", "1")
END_TIMEOUT_S = 120.0
_ENVIRON = {"PYTHONFAULTHANDLER": "1"}  # for dump_stacks


class TrainingEnded(Exception):
    """The training has ended for good before its interruptions did."""


class Subject(Protocol):
    """A training of ``RANKS`` ranks, on a node each or on this machine, with attempts, counted from 1."""

    def read_attempts(self) -> list[list[Steps]]:
        """Return, for each attempt that has started, the steps of each rank."""

    def is_over(self) -> bool:
        """Return whether nothing will start another attempt."""

    def restart_by_hand(self) -> None:
        """Do what a person does after the training has ended too early."""

    def kill_rank(self, rank: int) -> None: ...

    def preempt(self) -> None: ...

    def kill_node(self) -> str:
        """Kill all processes of the node of rank 1 and return the node's name."""

    def requeue(self) -> None:
        """Ask for a requeue as the training's user does."""

    def dump_stacks(self) -> None:
        """Have the ranks and their data loaders' workers print the stacks of their threads, which ends them."""

    def cancel(self) -> None: ...


class ClustertrainRun:
    """A run of clustertrain, on Slurm or on this machine."""

    def __init__(
        self, program: Program, folder: Path, *, on_slurm: bool, time: str, pace: float, preempt_at: list[int]
    ) -> None:
        self._out = folder / "out"
        self._out.mkdir()
        self._on_slurm = on_slurm
        script = program.write(folder, alone=False, pace=pace)
        env = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTERTRAIN_")}
        env |= {"CLUSTERTRAIN_HOME": str(folder / "home"), **_ENVIRON}
        options = [
            *(_TWO_NODES if on_slurm else _ONE_NODE),
            "--cpus-per-gpu",
            "1",
            "--device",
            "cpu",
            "--max-requeues",
            "1000",
        ]
        options += ["--backend", "slurm", "--sbatch", "exclusive"] if on_slurm else ["--backend", "local"]
        options += ["--time", time] if time else []
        options += ["--set", f"preemption_test.preempt_at_steps={preempt_at}"] if preempt_at else []
        command = (sys.executable, str(script), str(self._out), str(TOTAL))
        self.run = runs.submit(env, *options, "--", *command)

    def read_attempts(self) -> list[list[Steps]]:
        folders = sorted((self.run.path / "attempts").glob("[0-9]*"), key=lambda p: int(p.name))
        return [[read_steps(f / "logs" / f"rank-{rank}.log") for rank in range(RANKS)] for f in folders]

    def is_over(self) -> bool:
        return self.run.poll_status()["state"] in FINAL

    def restart_by_hand(self) -> None:
        self.requeue()

    def kill_rank(self, rank: int) -> None:
        _kill_rank(self._out, rank)

    def preempt(self) -> None:
        _preempt(self._job_id())

    def kill_node(self) -> str:
        return _kill_node(self._job_id())

    def requeue(self) -> None:
        # In this process: the training would do 50 steps while another one imports the command.
        with mock.patch.dict(os.environ, self.run.env, clear=True), contextlib.redirect_stdout(io.StringIO()):
            try:
                cli.main(["requeue", self.run.id], standalone_mode=False)
            except ClusterTrainError as e:
                raise TrainingEnded(str(e)) from e

    def dump_stacks(self) -> None:
        _dump_stacks(self._out)

    def cancel(self) -> None:
        self.run.cancel_if_active()
        if self._on_slurm:
            _wait_for_end(self._job_id())

    def _job_id(self) -> str:
        return str(self.run.poll_status()["job_id"])


class BatchScript:
    """The same program under ``sbatch --requeue``, with the answer of its framework and nothing of clustertrain."""

    def __init__(self, program: Program, folder: Path, time: str, pace: float) -> None:
        self._out, self._folder = folder / "out", folder
        self._out.mkdir()
        command = [sys.executable, str(program.write(folder, alone=True, pace=pace)), str(self._out), str(TOTAL)]
        if program.needs_torchrun:
            endpoint = '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:29511"'
            launcher = (
                f"{shlex.quote(sys.executable)} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 {endpoint}"
            )
            command = command[1:]
        else:
            launcher = ""
        lines = [
            "#!/bin/bash",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "logs=$PWD/attempt-$(ls -d attempt-* 2>/dev/null | wc -l)",  # its folder is the working directory
            'mkdir "$logs"',
            *(f"export {name}={value}" for name, value in _ENVIRON.items()),
            f'srun --output="$logs/task-%t.log" {launcher} {shlex.join(command)}',
        ]
        self._script = folder / "job.sh"
        self._script.write_text("\n".join(lines) + "\n")
        self._options = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--exclusive", "--requeue"]
        self._options += ["--open-mode=append", f"--chdir={folder}", "--export=ALL", *program.sbatch]
        self._options += [f"--time={time}"] if time else []
        self.job_id = self._submit()

    def _submit(self) -> str:
        done = testbed.run("sbatch", "--parsable", *self._options, str(self._script))
        if done.returncode:
            raise testbed.TestbedFailed(f"sbatch: {done.stderr}")
        return done.stdout.strip()

    def read_attempts(self) -> list[list[Steps]]:
        folders = sorted(self._folder.glob("attempt-*"), key=lambda p: int(p.name.rpartition("-")[2]))
        return [[read_steps(f / f"task-{rank}.log") for rank in range(RANKS)] for f in folders]

    def is_over(self) -> bool:
        return not testbed.queue([self.job_id])

    def restart_by_hand(self) -> None:
        self.job_id = self._submit()

    def kill_rank(self, rank: int) -> None:
        _kill_rank(self._out, rank)

    def preempt(self) -> None:
        _preempt(self.job_id)

    def kill_node(self) -> str:
        return _kill_node(self.job_id)

    def requeue(self) -> None:
        testbed.run("scontrol", "requeue", self.job_id)

    def dump_stacks(self) -> None:
        _dump_stacks(self._out)

    def cancel(self) -> None:
        testbed.run("scancel", self.job_id)
        _wait_for_end(self.job_id)


def _dump_stacks(out: Path) -> None:
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if str(out) in (process.info["cmdline"] or ()) and "srun" not in process.name():
                process.send_signal(signal.SIGABRT)


def _kill_rank(out: Path, rank: int) -> None:
    """Kill the process of a rank, which is the oldest one with its arguments and its variable."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        with contextlib.suppress(psutil.Error):
            environ = process.environ() if str(out) in (process.info["cmdline"] or ()) else {}
            if environ.get("RANK", environ.get("SLURM_PROCID")) == str(rank) and "srun" not in process.name():
                found.append((process.info["create_time"], process))
    if found:
        min(found)[1].kill()


def _list_nodes(job_id: str) -> list[str]:
    nodes = testbed.run("squeue", "-h", "-j", job_id, "-o", "%N").stdout.strip()
    return testbed.run("scontrol", "show", "hostnames", nodes).stdout.split() if nodes else []


def _preempt(job_id: str) -> None:
    error = testbed.preempt(_list_nodes(job_id))
    if error:
        raise testbed.TestbedFailed(f"the preempting job: {error}")


def _kill_node(job_id: str) -> str:
    node = _list_nodes(job_id)[-1]
    testbed.node("kill", node)
    return node


def _wait_for_end(job_id: str) -> None:
    clock.wait_until(lambda: not re.search(r"\S", _squeue(job_id)), END_TIMEOUT_S, 1.0)


def _squeue(job_id: str) -> str:
    with contextlib.suppress(subprocess.SubprocessError):
        return testbed.run("squeue", "-h", "-j", job_id).stdout
    return ""
