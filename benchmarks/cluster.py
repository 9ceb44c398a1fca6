"""A Slurm cluster for a benchmark: the machine's cluster, otherwise the testbed."""

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
_CANCEL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Cluster:
    """A Slurm cluster that answers."""

    name: str
    version: str
    env: dict[str, str]
    """Environment in which Slurm's commands and clustertrain use this cluster."""

    def cancel(self, job_id: str) -> None:
        """Cancel a job and wait until it has left the nodes, so that it does not affect the next command."""
        subprocess.run(["scancel", job_id], env=self.env, check=True, capture_output=True)
        deadline = time.monotonic() + _CANCEL_TIMEOUT_S
        while self._is_alive(job_id):
            if time.monotonic() > deadline:
                raise CannotRun(f"job {job_id} has not ended {_CANCEL_TIMEOUT_S:g} s after scancel")
            time.sleep(0.05)

    def _is_alive(self, job_id: str) -> bool:
        argv = ["squeue", "-h", "-j", job_id, "-t", "PENDING,RUNNING,COMPLETING", "-o", "%i"]
        return bool(subprocess.run(argv, env=self.env, check=False, capture_output=True).stdout.strip())


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Yield the cluster that sbatch uses here, otherwise the testbed, which is started and ended if it is not up.

    Raises:
        CannotRun: Slurm is not installed, or the testbed cannot run here.
    """
    if shutil.which("sbatch") is None:
        raise CannotRun("sbatch is not installed: run slurm/install-packages as root, or run this on a login node")
    env = dict(os.environ)
    if not _answers(env):
        env = _testbed_environ()
    if _answers(env):
        yield _describe(env)
        return
    up = subprocess.run([str(_TESTBED / "up")], capture_output=True, text=True, check=False)
    if up.returncode:
        raise CannotRun(f"no Slurm cluster answers, and the testbed does not start: {up.stderr.strip()}")
    try:
        yield _describe(env)
    finally:
        subprocess.run([str(_TESTBED / "down")], capture_output=True, check=True)


def _answers(env: dict[str, str]) -> bool:
    return subprocess.run(["sinfo", "-h"], env=env, capture_output=True, check=False).returncode == 0


def _testbed_environ() -> dict[str, str]:
    script = '. "$1" && env -0'
    done = subprocess.run(["bash", "-c", script, "bash", str(_TESTBED / "env")], capture_output=True, check=True)
    return dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if "=" in pair)


def _describe(env: dict[str, str]) -> Cluster:
    def run(*argv: str) -> str:
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()

    settings = (line.partition("=") for line in run("scontrol", "show", "config").splitlines())
    name = next((value.strip() for key, _, value in settings if key.strip() == "ClusterName"), "unknown")
    return Cluster(name=name, version=run("sbatch", "--version"), env=env)
