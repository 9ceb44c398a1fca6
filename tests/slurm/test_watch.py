"""`clustertrain watch` on jobs that were started by bare sbatch and by submitit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs import INTERRUPTIBLE
from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm
CLI = [sys.executable, "-m", "clustertrain"]
NODES = ["node01", "node02", "node03", "node04"]
NOBODY = 65534
OPTIONS = ("-N4", "--ntasks-per-node=2", "--gres=gpu:2", "--mem=4000", "--job-name=their training", "-o", "out.txt")
# As a user's script does: srun starts the ranks, and the shell names them for torch.
SCRIPT = f"""
export WORLD_SIZE=8 MASTER_ADDR=node01 MASTER_PORT=29500
srun bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
exec {sys.executable} -c "import time; time.sleep(SECONDS)"'
"""


def script(seconds: int) -> str:
    return SCRIPT.replace("SECONDS", str(seconds))


def run_cli(env: dict[str, str], *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*CLI, *argv], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done


def watch_once(env: dict[str, str], job: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run_cli(env, "watch", job, "--json").stdout)
    return report


def gpus_by_rank(report: dict[str, Any]) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for gpu in report["gpus"]:
        found.setdefault(gpu["node"], []).append(gpu["ranks"])
    return found


def list_samplers(env: dict[str, str]) -> list[int]:
    """Return the processes on the nodes of these tests' runs, and the srun that has started them."""
    found = [(p.pid, p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    return [pid for pid, argv in found if "watch-node" in argv and env["CLUSTERTRAIN_HOME"] in argv[-1]]


def list_watch_steps(cluster: Cluster) -> list[str]:
    lines = cluster.run("squeue", "-h", "-s", "-o", "%i %j").stdout.splitlines()
    return [line for line in lines if "clustertrain-watch" in line]


def wait_running(cluster: Cluster, job: str) -> None:
    cluster.wait_for(
        lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip() == "RUNNING", 60, "start"
    )


@pytest.fixture
def job(cluster: Cluster, submit: Callable[..., str]) -> str:
    """A job of eight ranks on four nodes, started by bare sbatch."""
    number = submit(script(300), *OPTIONS)
    wait_running(cluster, number)
    return number


def test_report_of_a_job_by_sbatch(env: dict[str, str], cluster: Cluster, job: str) -> None:
    report = watch_once(env, job)
    assert gpus_by_rank(report) == {node: [[2 * i], [2 * i + 1]] for i, node in enumerate(NODES)}
    assert [h["node"] for h in report["hosts"]] == NODES
    assert all(h["memory_allocated_gib"] == pytest.approx(4000 / 1024, abs=0.01) for h in report["hosts"])
    assert all(g["utilization"] is not None and g["samples"] >= 2 for g in report["gpus"])
    assert (report["state"], report["watched"], report["training"]) == ("running", True, None)
    assert report["goodput"]["ratio"] is None
    assert list_watch_steps(cluster) == [] and list_samplers(env) == []
    for verb, words in (("cancel", f"scancel {job}"), ("requeue", f"scontrol requeue {job}"), ("rerun", "submit -- ")):
        refused = run_cli(env, verb, job, check=False)
        assert refused.returncode == 2 and "was started without clustertrain" in refused.stderr
        assert words in refused.stderr
    assert "not recorded: the job was started without" in run_cli(env, "status", job).stdout
    page = Path(env["CLUSTERTRAIN_HOME"], "page.html")
    assert run_cli(env, "telemetry", job, "--html", str(page)).returncode == 0 and page.stat().st_size > 10_000


def test_report_of_a_job_by_submitit(env: dict[str, str], cluster: Cluster, tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys, time, submitit
        executor = submitit.AutoExecutor(folder=sys.argv[1], cluster="slurm")
        executor.update_parameters(nodes=4, tasks_per_node=2, slurm_gres="gpu:2", timeout_min=5, mem_gb=4)
        print(executor.submit(time.sleep, 300).job_id)
    """)
    argv = [sys.executable, "-c", program, str(tmp_path)]
    number = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()
    try:
        wait_running(cluster, number)
        cluster.wait_for(lambda: len(list(tmp_path.glob("*_log.out"))) == 8, 60, "the output of all tasks")
        report = watch_once(env, number)
    finally:
        cluster.run("scancel", number)
    assert gpus_by_rank(report) == {node: [[2 * i], [2 * i + 1]] for i, node in enumerate(NODES)}


def test_job_that_ends_while_it_is_watched(
    env: dict[str, str], cluster: Cluster, submit: Callable[..., str], tmp_path: Path
) -> None:
    number = submit(script(12), *OPTIONS)
    wait_running(cluster, number)
    before = sorted(path.name for path in tmp_path.iterdir())
    page = Path(env["CLUSTERTRAIN_HOME"], "ended.html")
    done = run_cli(env, "watch", number, "--html", str(page))
    assert done.stdout.count("their-training-") == 2, done.stdout  # a first report, and one at the end
    assert "completed" in done.stdout and page.is_file()
    assert cluster.job_states(number) == ["COMPLETED"]
    exit_codes = cluster.run("sacct", "-n", "-P", "-X", "-j", number, "-o", "ExitCode,DerivedExitCode").stdout
    assert exit_codes.split() == ["0:0|0:0"]
    status = json.loads(run_cli(env, "status", number, "--json").stdout)
    assert (status["state"], status["attempts"][0]["state"]) == ("completed", "completed")
    assert list_samplers(env) == []
    assert sorted({*(path.name for path in tmp_path.iterdir())} - {"out.txt"}) == sorted({*before} - {"out.txt"})
    ended = run_cli(env, "watch", number, check=False)
    assert ended.returncode == 1 and f"job {number} has ended: COMPLETED" in ended.stderr


def test_nothing_is_left_after_ctrl_c_and_after_a_kill(
    env: dict[str, str], cluster: Cluster, job: str, tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {**env, "TMPDIR": str(temporary)}
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        argv = [*INTERRUPTIBLE, *CLI, "watch", job]
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as command:
            assert command.stdout is not None
            assert command.stdout.readline()
            assert len(list_samplers(env)) > 0
            psutil.Process(command.pid).send_signal(number)
            command.stdout.read()
        cluster.wait_for(
            lambda: not list_samplers(env) and not list_watch_steps(cluster), 20, "the end of the samplers"
        )
    assert cluster.run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip() == "RUNNING"
    assert list(temporary.iterdir()) == []
    # The steps of the job itself still get all of its cores, memory and GPUs.
    done = cluster.run("srun", f"--jobid={job}", "--overlap", "-N4", "-n8", "--mem=4000", "--gres=gpu:2", "hostname")
    assert sorted(done.stdout.split()) == sorted(2 * NODES)


def test_partitioned_node_ends_its_sampler(env: dict[str, str], cluster: Cluster, submit: Callable[..., str]) -> None:
    """The node no longer hears from the command, and its sampler must leave although nobody can tell it to."""
    number = submit(script(300), "--no-kill", *OPTIONS)
    wait_running(cluster, number)
    argv = [*INTERRUPTIBLE, *CLI, "watch", number]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as command:
        assert command.stdout is not None
        try:
            assert command.stdout.readline()
            before = set(list_samplers(env))
            cluster.partition_node("node04")
            cluster.wait_for(lambda: len(before & set(list_samplers(env))) < len(before), 60, "the end of one sampler")
        finally:
            cluster.heal_node("node04")
            command.send_signal(signal.SIGINT)
            command.stdout.read()
    cluster.wait_for(lambda: not list_samplers(env) and not list_watch_steps(cluster), 60, "the end of all samplers")


def test_job_of_another_user_is_refused_with_the_words_of_slurm(
    env: dict[str, str], cluster: Cluster, job: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = Path(tmp_path_factory.mktemp("nobody"))
    os.chown(home, NOBODY, NOBODY)
    other = {**env, "CLUSTERTRAIN_HOME": str(home / "home"), "HOME": str(home)}
    # The Python of the tests and their folder may be closed for others, which is not what is tested.
    capabilities = "+dac_read_search,+dac_override"
    argv = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", f"--inh-caps={capabilities}"]
    argv += [f"--ambient-caps={capabilities}", "--", *CLI, "watch", job]
    done = subprocess.run(argv, env=other, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert f"Slurm refused a step in job {job} of root" in done.stderr
    assert "Access/permission denied" in done.stderr
    assert list((home / "home" / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        (("-N2", "--ntasks-per-node=2", "--gpus-per-task=1"), [2, 2]),
        (("-N2", "--ntasks-per-node=4", "--gpus=8"), [1, 7]),
        (("-N2", "--ntasks-per-node=1"), []),
    ],
    ids=["GPUs of each task", "different GPUs on each node", "no GPUs"],
)
def test_gpus_of_other_requests(
    env: dict[str, str], cluster: Cluster, submit: Callable[..., str], options: tuple[str, ...], gpus: list[int]
) -> None:
    number = submit("sleep 120", "-o", "/dev/null", *options)
    wait_running(cluster, number)
    report = watch_once(env, number)
    counts = [sum(g["node"] == h["node"] for g in report["gpus"]) for h in report["hosts"]]
    assert len(report["hosts"]) == 2 and sorted(c for c in counts if c) == gpus


def test_requeued_job_is_watched_again(env: dict[str, str], cluster: Cluster, job: str) -> None:
    argv = [*INTERRUPTIBLE, *CLI, "watch", job]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as command:
        assert command.stdout is not None
        try:
            assert command.stdout.readline()
            cluster.run("scontrol", "requeue", job)

            def attempts() -> list[dict[str, Any]]:
                found: list[dict[str, Any]] = json.loads(run_cli(env, "status", job, "--json").stdout)["attempts"]
                return found

            cluster.wait_for(lambda: len(attempts()) == 2, 90, "the second attempt")
            first, second = attempts()
            assert (first["requeued"], second["restart"], second["state"]) == ("slurm", 1, "running")
            cluster.wait_for(lambda: len(list_samplers(env)) >= 4, 30, "the samplers of the second attempt")
        finally:
            command.send_signal(signal.SIGINT)
            command.stdout.read()
