"""Submission to the real cluster: refusals, outer allocations, hostile values, and the backend's queries.

The jobs run a fake interpreter that records its environment, so that only submission is tested.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import PENDING, RUNNING, JobView, Submission
from clustertrain.scheduler.slurm import SlurmBackend, find_work_dir

pytestmark = pytest.mark.slurm
TIMEOUT_S = 120.0
HOSTILE = "a b'\"$(touch pwned)`touch pwned`\n%j\\ é #x"

# As `batch` it becomes the step or, with SPY_WAITS, waits for a signal. As `agent` it records its environment.
SPY = """#!{python} -I
import json, os, signal, sys
words = sys.argv[1:]
if words[3] == "batch":
    if os.environ.get("SPY_WAITS"):
        signal.pause()
    step = words[words.index("--") + 1 :]
    os.execvp(step[0], step)
seen = os.path.join(os.environ["CLUSTERTRAIN_RUN_DIR"], "seen-" + os.environ["SLURM_NODEID"])
with open(seen + ".part", "w") as f:
    json.dump({{"env": dict(os.environ), "cwd": os.getcwd()}}, f)
os.rename(seen + ".part", seen)
"""


class Site:
    """A user's environment on the cluster, with their own profile."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.runs = folder / "home" / "runs"
        (folder / "work").mkdir()
        (folder / "profiles").mkdir()
        spy = folder / "spy"
        spy.write_text(SPY.format(python=sys.executable))
        spy.chmod(0o755)
        profile = f'python = "{spy}"\ndevice = "cpu"\npartition = "low"\nsetup = ["export FROM_SETUP=yes"]\n'
        (folder / "profiles" / "spy.toml").write_text(profile)
        self.env = {
            **env,
            "CLUSTERTRAIN_HOME": str(folder / "home"),
            "CLUSTERTRAIN_CLUSTER": "spy",
            "CLUSTERTRAIN_CLUSTER_PATH": str(folder / "profiles"),
        }
        del self.env["OMP_NUM_THREADS"]  # set for the tests; here --cpus-per-gpu sets it
        self.jobs: list[str] = []

    def call(self, *args: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        argv = [
            *before,
            sys.executable,
            "-m",
            "clustertrain",
            "sweep" if "--grid" in args else "submit",
            "--json",
            *args,
        ]
        return subprocess.run(
            argv, env=self.env, cwd=self.folder / "work", capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )

    def submit(self, *args: str, before: tuple[str, ...] = ()) -> tuple[Path, str]:
        done = self.call(*args, before=before)
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        self.jobs.append(shown["job_id"])
        return Path(shown["run_dir"]), shown["job_id"]


@pytest.fixture
def site(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(tmp_path, cluster.env)
    monkeypatch.setenv("SLURM_CONF", site.env["SLURM_CONF"])
    yield site
    for job_id in site.jobs:
        SlurmBackend().cancel(job_id)


def recorded_task(run: Path, node: int) -> dict[str, Any]:
    path = run / f"seen-{node}"
    job_log = run / "job.log"
    arrived = clock.wait_until(path.exists, TIMEOUT_S)
    assert arrived, job_log.read_text() if job_log.exists() else "the job wrote nothing"
    task: dict[str, Any] = json.loads(path.read_text())
    return task


def wait_for_view(job_id: str, state: str, restarts: int = 0) -> JobView:
    def has_state() -> bool:
        view = SlurmBackend().query_jobs([job_id]).get(job_id)
        return view is not None and view.state == state and view.restarts == restarts

    assert clock.wait_until(has_state, TIMEOUT_S), SlurmBackend().query_jobs([job_id])
    return SlurmBackend().query_jobs([job_id])[job_id]


def test_refused_partition_shows_slurm_error_and_leaves_nothing(site: Site) -> None:
    done = site.call("--partition", "nope")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("clustertrain: Slurm refused the job: ")
    assert "invalid partition specified: nope" in done.stderr
    assert list(site.runs.iterdir()) == []


def test_environment_reaches_every_task(site: Site) -> None:
    run, _ = site.submit("--nodes", "2", "--gpus", "2", "--cpus-per-gpu", "3", "--gpu-type", "h100", "--env", "A=b")
    for node in (0, 1):
        task = recorded_task(run, node)
        assert task["cwd"] == str(run)
        env = task["env"]
        assert env["FROM_SETUP"] == "yes" and env["A"] == "b" and env["OMP_NUM_THREADS"] == "3"
        assert env["CLUSTERTRAIN_HOME"] == site.env["CLUSTERTRAIN_HOME"]
        assert env["SLURM_CPUS_PER_TASK"] == "6" and env["SLURM_NNODES"] == "2" and env["SLURM_NTASKS"] == "2"
        assert len(env["CUDA_VISIBLE_DEVICES"].split(",")) == 2


def test_secret_reaches_shared_job_but_no_group_file(site: Site) -> None:
    done = site.call("--share", "--env", "SECRET=s3cret-canary", "--grid", "train.seed=1,2")
    shown = json.loads(done.stdout)
    job_id = shown["job_id"]
    site.jobs.append(job_id)
    run = Path(shown["runs"][1]["run_dir"])
    assert recorded_task(run, 0)["env"]["SECRET"] == "s3cret-canary"
    (run / "seen-0").unlink()
    open_to_others = [p for p in run.rglob("*") if p.is_file() and p.stat().st_mode & 0o077]
    assert open_to_others and not [p for p in open_to_others if "s3cret-canary" in p.read_text(errors="replace")]
    job_info = subprocess.run(
        ["scontrol", "show", "job", job_id], env=site.env, capture_output=True, text=True, check=True
    ).stdout
    assert "s3cret-canary" not in job_info


def test_outer_allocation_does_not_leak(site: Site) -> None:
    inside = ("srun", "--partition=low", "--nodes=1", "--ntasks=1", "--mem=321", "--cpus-per-task=2", "--quiet")
    run, job_id = site.submit("--nodes", "2", "--gpus", "1", before=inside)
    env = recorded_task(run, 0)["env"]
    assert env["SLURM_JOB_ID"] == job_id and env["SLURM_NNODES"] == "2" and env["SLURM_CPUS_PER_TASK"] == "1"
    assert env.get("SLURM_MEM_PER_NODE") != "321"


def test_sbatch_variables_do_not_leak(site: Site) -> None:
    site.env |= {"SBATCH_PARTITION": "nope", "SBATCH_EXPORT": "NONE", "SLURM_MEM_PER_CPU": "1", "SLURM_NNODES": "4"}
    run, _ = site.submit("--env", "A=b")
    assert recorded_task(run, 0)["env"]["A"] == "b"


def test_hostile_values_are_harmless_end_to_end(site: Site) -> None:
    site.env["CLUSTERTRAIN_HOME"] = str(site.folder / "ho me $(touch pwned)'\"é")
    script = site.folder / "work" / f"{HOSTILE.replace('/', '')}.py"
    script.write_text("")
    plain = HOSTILE.replace("\n", "")
    args = ["--name", HOSTILE, "--env", f"V={HOSTILE}", "--sbatch", f"comment={plain}"]
    run, job_id = site.submit(*args, str(script), HOSTILE)
    task = recorded_task(run, 0)
    assert task["env"]["V"] == HOSTILE and task["cwd"] == str(run)
    assert task["env"]["PYTHONPATH"].split(":")[0] == str(run / "code")
    assert (run / "code" / script.name).is_file()
    shown = subprocess.run(
        ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--Format=Comment:|"],
        env=site.env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.rstrip("|\n") == plain
    assert find_work_dir(job_id) == run
    assert not list(site.folder.rglob("pwned"))


def test_backend_reports_job_over_its_life(site: Site) -> None:
    backend = SlurmBackend()
    _, held = site.submit("--sbatch", "hold")
    site.env["SPY_WAITS"] = "1"
    run, job_id = site.submit("--nodes", "2", "--time", "10")
    assert wait_for_view(held, PENDING).reason == "JobHeldUser"
    running = wait_for_view(job_id, RUNNING)
    assert len(running.nodes) == 2 and running.start_time and running.end_time == running.start_time + 600
    assert set(backend.query_jobs([held, job_id, "4000000"])) == {held, job_id}
    assert backend.query_jobs(["4000000"]) == {}

    backend.requeue(job_id)
    assert wait_for_view(job_id, RUNNING, restarts=1).is_alive
    fresh = backend.restart(job_id, Submission(RunDir(run), options={"hold": ""}))
    assert wait_for_view(fresh, PENDING).reason == "JobHeldUser"
    backend.cancel(fresh)
    backend.cancel(job_id)
    assert clock.wait_until(lambda: not backend.query_jobs([job_id])[job_id].is_alive, TIMEOUT_S)
    backend.cancel(job_id)  # a second cancel is not an error

    def states() -> list[str]:
        return [start.state for start in backend.list_starts(job_id)]

    # slurmdbd gets the end a little later.
    assert clock.wait_until(lambda: states()[-1:] == ["CANCELLED"], TIMEOUT_S), states()
    assert states() == ["REQUEUED", "CANCELLED"]
    assert all(len(start.nodes) == 2 and start.start and start.end for start in backend.list_starts(job_id))
    assert (run / "job.log").exists()
