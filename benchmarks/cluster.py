"""A Slurm cluster for a benchmark: the one that answers, else the testbed on this machine, brought up for it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measure import ROOT, CannotRun

_TESTBED = ROOT / "slurm" / "testbed"
_GONE_S = 60.0


@dataclass(frozen=True)
class Cluster:
    """``env`` points Slurm's commands and clustertrain at it."""

    name: str
    version: str
    env: dict[str, str]

    def cancel(self, job_id: str) -> None:
        """Cancel one job by its id and wait until it has left the nodes, so that it costs the next command nothing."""
        subprocess.run(["scancel", job_id], env=self.env, check=True, capture_output=True)
        deadline = time.monotonic() + _GONE_S
        while self._alive(job_id):
            if time.monotonic() > deadline:
                raise CannotRun(f"job {job_id} is still there {_GONE_S:g} s after scancel")
            time.sleep(0.05)

    def _alive(self, job_id: str) -> bool:
        argv = ["squeue", "-h", "-j", job_id, "-t", "PENDING,RUNNING,COMPLETING", "-o", "%i"]
        return bool(subprocess.run(argv, env=self.env, check=False, capture_output=True).stdout.strip())


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """The cluster that sbatch speaks to here, else the testbed; a testbed brought up for this is taken down after.

    Raises:
        CannotRun: there is no Slurm on this machine, or the testbed cannot run on it.
    """
    if shutil.which("sbatch") is None:
        raise CannotRun("sbatch is not installed: run slurm/install-packages as root, or run this on a login node")
    here = dict(os.environ)
    if not _answers(here):
        here = _testbed_environ()
    if _answers(here):
        yield _describe(here)
        return
    up = subprocess.run([str(_TESTBED / "up")], capture_output=True, text=True, check=False)
    if up.returncode:
        raise CannotRun(f"no Slurm cluster answers, and the testbed does not come up: {up.stderr.strip()}")
    try:
        yield _describe(here)
    finally:
        subprocess.run([str(_TESTBED / "down")], capture_output=True, check=True)


def _answers(env: dict[str, str]) -> bool:
    return subprocess.run(["sinfo", "-h"], env=env, capture_output=True, check=False).returncode == 0


def _testbed_environ() -> dict[str, str]:
    script = '. "$1" && env -0'
    done = subprocess.run(["bash", "-c", script, "bash", str(_TESTBED / "env")], capture_output=True, check=True)
    return dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if "=" in pair)


def _describe(env: dict[str, str]) -> Cluster:
    def said(*argv: str) -> str:
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()

    settings = (line.partition("=") for line in said("scontrol", "show", "config").splitlines())
    name = next((value.strip() for key, _, value in settings if key.strip() == "ClusterName"), "unknown")
    return Cluster(name=name, version=said("sbatch", "--version"), env=env)
