"""The testbed of a storm: start and stop it, kill and restart daemons and nodes, and read its queue."""

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
NO_TESTBED = 3  # exit status of `status`: there is no testbed
COMMAND_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 60.0
TRIES = 3  # on a busy machine, a node may take longer to return than the testbed waits


class TestbedFailed(RuntimeError):
    """A failure of the testbed, not of what is tested on it."""


def run(*argv: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, text=True, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as e:
        return subprocess.CompletedProcess(argv, 124, "", f"timed out after {e.timeout:g} s")


def _testbed(command: str, *argv: str) -> None:
    for _ in range(TRIES):
        result = run(str(FOLDER / command), *argv, timeout_s=300.0)
        if result.returncode in (0, CANNOT_RUN):
            break
    if result.returncode:
        raise TestbedFailed(f"{command} {' '.join(argv)}: {result.returncode}\n{result.stdout}{result.stderr}")


@contextmanager
def testbed() -> Iterator[None]:
    """Keep the testbed up, with its user's environment in this process; stop it afterwards unless it was up before."""
    before = run(str(FOLDER / "status")).returncode
    try:
        _testbed("up")
        script = '. "$1" && env -0'
        out = subprocess.run(["bash", "-c", script, "bash", FOLDER / "env"], text=True, capture_output=True, check=True)
        os.environ.update(entry.split("=", 1) for entry in out.stdout.split("\0") if "=" in entry)
        yield
    finally:
        _testbed("down" if before == NO_TESTBED else "up")


def repair() -> None:
    """Start whatever does not run, and wait until it answers."""
    _testbed("up")


def node(action: str, name: str) -> None:
    """Change a node; ``action`` is ``kill``, ``partition``, ``heal``, ``kill-slurmd`` or ``start-slurmd``."""
    _testbed("node", action, name)


def kill_daemon(name: str) -> None:
    """Kill ``slurmctld``, ``slurmdbd`` or ``munged``; the next :func:`repair` starts it."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                Path(process.exe()).name.startswith(name)
                and process.environ().get("CLUSTERTRAIN_TESTBED_DAEMON") == f"{STATE}:{name}"
            ):
                process.send_signal(signal.SIGKILL)


def queue(job_ids: Sequence[str]) -> list[str]:
    """Return those of ``job_ids`` that are still in the queue."""
    return [i for i in run("squeue", "-h", "-o", "%i").stdout.split() if i in job_ids]


def minutes_run(job_id: str) -> int:
    """Return the whole minutes since the job's start."""
    return _minutes(job_id, "%M")


def limit(job_id: str) -> int:
    """Return the job's time limit in minutes."""
    return _minutes(job_id, "%l")


def _minutes(job_id: str, column: str) -> int:
    match = re.fullmatch(
        r"(?:(?:(\d+)-)?(\d+):)?(\d+):\d+", run("squeue", "-h", "-j", job_id, "-o", column).stdout.strip()
    )
    days, hours, minutes = (int(x or 0) for x in match.groups()) if match else (0, 0, 0)
    return (days * 24 + hours) * 60 + minutes


def preempt(nodes: Sequence[str]) -> str:
    """Preempt ``nodes`` with a short job of the high partition, and return the output of sbatch."""
    argv = ["-p", "high", "-w", ",".join(nodes), f"-N{len(nodes)}", "--exclusive", "-o", "/dev/null"]
    return run("sbatch", *argv, "-J", "preemptor", "-t", "1", "--wrap", "true").stderr


def end_jobs(names: Sequence[str]) -> None:
    """Cancel all jobs with these names and wait until they have left the queue."""
    argv = ["-n", ",".join(names)]
    run("scancel", *argv)
    clock.wait_until(lambda: not run("squeue", "-h", *argv).stdout.strip(), EXIT_TIMEOUT_S, 1.0)
