"""The testbed of a storm: brought up, its daemons and nodes killed and brought back, its queue read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from clustertrain import clock
from tests.paths import ROOT

FOLDER = ROOT / "slurm" / "testbed"
STATE = os.environ.get("CLUSTERTRAIN_TESTBED_DIR", "/var/tmp/clustertrain-testbed")
CANNOT_RUN = 77
NOT_THERE = 3  # of status: no testbed at all
COMMAND_S = 60.0
GONE_S = 60.0
TRIES = 3  # on a busy machine a node may take longer to come back than the testbed waits


class TestbedFailed(RuntimeError):
    """The testbed, not what is tested on it."""


def run(*argv: str, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, text=True, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as e:
        return subprocess.CompletedProcess(argv, 124, "", f"no end within {e.timeout:g} s")


def _testbed(command: str, *argv: str) -> None:
    for _ in range(TRIES):
        done = run(str(FOLDER / command), *argv, timeout_s=300.0)
        if done.returncode in (0, CANNOT_RUN):
            break
    if done.returncode:
        raise TestbedFailed(f"{command} {' '.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}")


@contextmanager
def testbed() -> Iterator[None]:
    """Up while the context lasts, and this process's environment is that of its user. It is down afterwards unless it
    was up before."""
    was = run(str(FOLDER / "status")).returncode
    try:
        _testbed("up")
        script = '. "$1" && env -0'
        out = subprocess.run(["bash", "-c", script, "bash", FOLDER / "env"], text=True, capture_output=True, check=True)
        os.environ.update(entry.split("=", 1) for entry in out.stdout.split("\0") if "=" in entry)
        yield
    finally:
        _testbed("down" if was == NOT_THERE else "up")


def repair() -> None:
    """Start what does not run, and wait until it answers."""
    _testbed("up")


def node(action: str, name: str) -> None:
    """``kill``, ``partition`` or ``heal``; ``kill-slurmd`` or ``start-slurmd``."""
    _testbed("node", action, name)


def kill_daemon(name: str) -> None:
    """``slurmctld``, ``slurmdbd`` or ``munged``, which the next repair starts."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                Path(process.exe()).name.startswith(name)
                and process.environ().get("CLUSTERTRAIN_TESTBED_DAEMON") == f"{STATE}:{name}"
            ):
                process.send_signal(signal.SIGKILL)


def queue(job_ids: Sequence[str]) -> list[str]:
    """Those of the jobs that are not over."""
    return [i for i in run("squeue", "-h", "-o", "%i").stdout.split() if i in job_ids]


def minutes_run(job_id: str) -> int:
    """Whole minutes since the job's start."""
    return _minutes(job_id, "%M")


def limit(job_id: str) -> int:
    """The job's time limit, in minutes."""
    return _minutes(job_id, "%l")


def _minutes(job_id: str, what: str) -> int:
    found = re.fullmatch(
        r"(?:(?:(\d+)-)?(\d+):)?(\d+):\d+", run("squeue", "-h", "-j", job_id, "-o", what).stdout.strip()
    )
    days, hours, minutes = (int(x or 0) for x in found.groups()) if found else (0, 0, 0)
    return (days * 24 + hours) * 60 + minutes


def preempt(nodes: Sequence[str]) -> str:
    """A job of the high partition takes the nodes for a moment; what it printed."""
    argv = ["-p", "high", "-w", ",".join(nodes), f"-N{len(nodes)}", "--exclusive", "-o", "/dev/null"]
    return run("sbatch", *argv, "-J", "preemptor", "-t", "1", "--wrap", "true").stderr


def end_jobs(names: Sequence[str]) -> None:
    """End all jobs of these names, and wait until they are gone."""
    argv = ["-n", ",".join(names)]
    run("scancel", *argv)
    clock.wait_until(lambda: not run("squeue", "-h", *argv).stdout.strip(), GONE_S, 1.0)
