"""The one-machine Slurm cluster of slurm/testbed, started once per test session."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests import runs
from tests.fakes.nvml.build import build as build_nvml_stub
from tests.paths import ROOT
from tests.runs import Run

TESTBED = ROOT / "slurm" / "testbed"
CANNOT_RUN = 77


class Cluster:
    """Four hosts, node01 to node04. `env` is the environment in which Slurm's commands reach them."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)

    def run(self, *argv: str, check: bool = True, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command on the cluster. With `check` a failure fails the test and shows the output."""
        done = subprocess.run(
            argv, env=self.env, text=True, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            pytest.fail(f"{' '.join(argv)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def up(self, *options: str) -> None:
        """Repair the cluster and give it exactly these options of slurm/testbed/up."""
        self.run(str(TESTBED / "up"), *options, timeout_s=300)

    def stop_controller(self) -> None:
        """End slurmctld, which saves its state first; `up` starts it again."""
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.info["name"] == "slurmctld" and process.environ()["SLURM_CONF"] == self.env["SLURM_CONF"]:
                    process.terminate()
                    process.wait(30)

    def kill_node(self, node: str) -> None:
        """Kill every process of the host at once. Its network link stays up."""
        self.run(str(TESTBED / "node"), "kill", node)

    def partition_node(self, node: str) -> None:
        """Disconnect the host from the network. Its processes continue."""
        self.run(str(TESTBED / "node"), "partition", node)

    def heal_node(self, node: str) -> None:
        """Undo kill_node and partition_node, and wait until the host accepts jobs."""
        self.run(str(TESTBED / "node"), "heal", node)

    def node_states(self) -> dict[str, str]:
        """Return the state of each host as sinfo prints it. A trailing * marks a host that does not answer."""
        lines = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def job_states(self, job: str) -> list[str]:
        """Return the states of all attempts of a job, oldest first."""
        out = self.run("sacct", "-D", "-X", "-n", "-P", "-j", job, "-o", "State").stdout
        return [line.split()[0] for line in out.splitlines() if line]

    def wait_for(self, predicate: Callable[[], object], timeout: float, what: str) -> None:
        """Poll until the predicate holds. After `timeout` seconds fail the test and show the state of the cluster."""
        deadline = time.monotonic() + timeout
        while not predicate():
            if time.monotonic() > deadline:
                state = "\n".join(self.run(*argv, check=False).stdout for argv in (["sinfo", "-N"], ["squeue"]))
                pytest.fail(f"not within {timeout:.0f} s: {what}\n{state}")
            time.sleep(0.2)


def _testbed(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TESTBED / command], text=True, capture_output=True, timeout=300, check=False)


def _client_env() -> dict[str, str]:
    """Return os.environ with the variables that slurm/testbed/env exports."""
    script = '. "$1" && env -0'
    out = subprocess.run(["bash", "-c", script, "bash", TESTBED / "env"], text=True, capture_output=True, check=True)
    return dict(entry.split("=", 1) for entry in out.stdout.split("\0") if "=" in entry)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster with all parts up. A cluster that was up before the session stays up after it."""
    status = _testbed("status")
    if status.returncode:
        up = _testbed("up")
        if up.returncode == CANNOT_RUN and os.environ.get("CLUSTERTRAIN_REQUIRE_SLURM") != "1":
            pytest.skip(up.stderr.strip())
        if up.returncode:
            pytest.fail(f"slurm/testbed/up: exit status {up.returncode}\n{up.stdout}{up.stderr}", pytrace=False)
    yield Cluster(_client_env())
    if status.returncode == 3:
        down = _testbed("down")
        assert down.returncode == 0, down.stderr


@pytest.fixture
def cgroup_tracking(cluster: Cluster) -> Iterator[None]:
    """Nodes that send the signals of a job step only to what slurmstepd has started, as on most clusters."""
    up = cluster.run(str(TESTBED / "up"), "--proctrack", "cgroup", check=False, timeout_s=300)
    if up.returncode == CANNOT_RUN:
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, up.stderr
    yield
    cluster.wait_for(lambda: not cluster.run("squeue", "-h").stdout, 90, "the end of all jobs")
    cluster.up()


@pytest.fixture(scope="session")
def env(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user of the testbed, with a fake NVML library."""
    folder = tmp_path_factory.mktemp("slurm")
    build_nvml_stub(folder / "nvml")
    return {
        **cluster.env,
        "CLUSTERTRAIN_HOME": str(folder / "home"),
        "LD_LIBRARY_PATH": str(folder / "nvml"),
        "NVML_STUB_DEVICES": "8",
    }


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture
def submit_run(env: dict[str, str]) -> Iterator[Callable[..., Run]]:
    """Return a function that submits a run. Runs that a failing test leaves are cancelled."""
    runs_submitted: list[Run] = []

    def submit(*argv: str) -> Run:
        runs_submitted.append(runs.submit(env, *argv))
        return runs_submitted[-1]

    yield submit
    for run in runs_submitted:
        run.cancel_if_active()


@pytest.fixture
def preempt(cluster: Cluster) -> Callable[[Run], None]:
    """Return a function that preempts a run: a job in the high partition takes all nodes briefly."""

    def preempt_run(run: Run) -> None:
        before = len(run.status()["attempts"])
        cluster.run("sbatch", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "true")
        run.wait_for(lambda s: s["attempts"][before - 1]["end_unix_s"] is not None, "the preemption")

    return preempt_run


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return a function that submits a batch script with options of sbatch. Jobs that are left are cancelled."""
    jobs: list[str] = []

    def sbatch(script: str, *options: str) -> str:
        path = tmp_path / f"job{len(jobs)}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        out = cluster.run("sbatch", "--parsable", f"--chdir={tmp_path}", "--open-mode=append", *options, str(path))
        jobs.append(out.stdout.strip())
        return jobs[-1]

    yield sbatch
    if jobs:
        cluster.run("scancel", *jobs)
        cluster.wait_for(
            lambda: not cluster.run("squeue", "-h", "-j", ",".join(jobs), check=False).stdout,
            60,
            f"the end of jobs {jobs}",
        )
