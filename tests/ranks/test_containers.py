"""Ranks in real containers on the local backend: stops, resumes, failures, and nothing that stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clustertrain import clock
from clustertrain.config.container import RuntimeName
from clustertrain.run.state import FINAL
from tests import containers, runs
from tests.runs import LOCAL, Run

pytestmark = pytest.mark.ranks
Submit = Callable[..., Run]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submit]:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_", "PYTHON"))}
    env |= {"CLUSTERTRAIN_HOME": str(tmp_path / "home"), "OF_THE_NODE": "1"}
    env |= {"PATH": containers.runtime_path(tmp_path), "PYTHONPATH": str(containers.ROOT)}
    bundle = containers.write_bundle(tmp_path)
    submitted: list[Run] = []

    def submit_program(runtime: RuntimeName, text: str, *options: str) -> Run:
        containers.require(runtime)
        (folder / "program.py").write_text(text)
        container = (f"--container={bundle}", f"--container-runtime={runtime}", *containers.mount_options())
        submitted.append(
            runs.submit(env, *LOCAL, "--gpus", "2", *container, *options, "--", "python", "program.py", "a b")
        )
        return submitted[-1]

    yield submit_program
    for run in submitted:
        run.cancel_if_active()
        run.wait_until_final()


def read_log(run: Run, rank: int, attempt: int = 1) -> str:
    path = run.path / "attempts" / str(attempt) / "logs" / f"rank-{rank}.log"
    return path.read_text() if path.exists() else ""


def wait_for_log(run: Run, text: str, attempt: int = 1) -> None:
    def is_there(status: dict[str, Any]) -> bool:
        assert status["state"] not in FINAL, run.explain()
        return all(text in read_log(run, rank, attempt) for rank in (0, 1))

    run.wait_for(is_there, f"{text!r} in the logs", 60.0)


def find_processes(run: Run) -> list[psutil.Process]:
    """Return the processes of a run's ranks and of their containers."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            env = process.environ()
            if env.get("CLUSTERTRAIN_RANK_DIR", "").startswith(f"/tmp/clustertrain-{run.id}-"):
                found.append(process)
    return found


SAVES_ON_TERM = """
import os, signal, sys, time

rank, run = os.environ["RANK"], os.environ["CLUSTERTRAIN_RUN_DIR"]
print("variables", os.environ.get("IMAGE_VARIABLE"), os.environ.get("OF_THE_NODE"), os.environ.get("GIVEN"), flush=True)
print("started", os.getcwd(), sys.argv[1:], "clustertrain_hooks" in sys.modules, flush=True)
path = os.path.join(run, "saved-" + rank)
if os.environ["CLUSTERTRAIN_ATTEMPT"] == "3":
    print("resumed at", open(path).read(), flush=True)
    if rank == "1":
        raise KeyError("lr")
    time.sleep(60)
stops = []
signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: print("child stopped", flush=True))
    while True:
        time.sleep(0.05)
print("ready", os.getpid(), flush=True)
while not stops:
    time.sleep(0.05)
open(path, "w").write("17")
print("saved", len(stops), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("runtime", containers.RUNTIMES)
def test_ranks_in_containers_stop_resume_fail_and_leave_nothing(submit: Submit, runtime: RuntimeName) -> None:
    run = submit(runtime, SAVES_ON_TERM, "--env", "GIVEN=a b\n$HOME", "--max-requeues", "3")
    wait_for_log(run, "ready")
    for rank in (0, 1):
        log = read_log(run, rank)
        assert "variables 1 None a b\n$HOME\n" in log
        assert f"started {Path.cwd()} ['a b'] True\n" in log
        pid = int(log.partition("ready ")[2].split()[0])
        assert psutil.Process(pid).environ()["RANK"] == str(rank)  # the PIDs are the node's

    (agent,) = [p for p in psutil.process_iter() if _is_agent(p, run)]
    agent.kill()  # nothing in it can clean up
    wait_for_log(run, "ready", attempt=2)
    assert {_attempt(p) for p in find_processes(run)} == {"2"}

    for process in find_processes(run):
        process.send_signal(signal.SIGUSR2)  # as Slurm's early warning of the time limit
    run.call("requeue", run.id)
    *_, stopped, last = run.wait_until_final(90.0)["attempts"]
    assert (stopped["state"], "ended with SIGKILL" in stopped["reason"]) == ("preempted", True), stopped
    assert (last["state"], "KeyError: 'lr'" in last["reason"]) == ("failed", True), last
    for rank in (0, 1):
        assert "saved 1\n" in read_log(run, rank, 2)
        assert "child stopped" not in read_log(run, rank, 2)
        assert "resumed at 17\n" in read_log(run, rank, 3)
    assert clock.wait_until(lambda: not find_processes(run), 10.0)
    assert not list(Path("/tmp").glob(f"clustertrain-{run.id}-*"))
    if runtime == "podman":
        listed = subprocess.run(["podman", "ps", "-aq", "--filter", f"name={run.id}"], capture_output=True, check=True)
        assert listed.stdout == b""


def _is_agent(process: psutil.Process, run: Run) -> bool:
    with contextlib.suppress(psutil.Error):
        is_agent = process.cmdline()[1:] == ["-P", "-m", "clustertrain", "agent"]
        return is_agent and process.environ().get("CLUSTERTRAIN_RUN_DIR") == str(run.path)
    return False


def _attempt(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.environ().get("CLUSTERTRAIN_ATTEMPT", "")
    return None


def test_container_that_cannot_start_is_explained_and_not_repeated(submit: Submit) -> None:
    run = submit("charliecloud", "", "--container-mount=/etc/hostname:/usr/nothing/here")
    (attempt,) = run.wait_until_final()["attempts"]
    assert attempt["state"] == "failed"
    assert "the container was not started (exit code 1): ch-run" in attempt["reason"], attempt
