"""What batch makes of a `requeue` of its attempt, and of a newer attempt of its run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from clustertrain import fsio
from clustertrain.agent import controller as module
from clustertrain.agent.claim import JobIdentity, claim_attempt
from clustertrain.agent.controller import JobController
from clustertrain.agent.signals import Signals
from clustertrain.config.job import RunSpec
from clustertrain.errors import EXIT_NO_REQUEUE, ClusterTrainError
from clustertrain.run import events, run_dir
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import Backend, JobView
from clustertrain.submit import continue_run

pytestmark = pytest.mark.long


class OneJob:
    """Its job runs for as long as anybody asks. It notes what it is asked to do."""

    name = "slurm"

    def __init__(self) -> None:
        self.done: list[Any] = []

    def query_jobs(self, job_ids: Any) -> dict[str, JobView]:
        return {j: JobView(j, "RUNNING") for j in job_ids if j == "7"}

    def list_starts(self, job_id: str) -> list[Any]:
        return []

    def requeue(self, job_id: str) -> None:
        self.done.append("requeue")
        os.kill(os.getpid(), signal.SIGTERM)  # as Slurm ends the process

    def restart(self, job_id: str, submission: Any) -> str:
        self.done.append(dict(submission.options))
        return "8"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    monkeypatch.setattr(module, "LATE_RESULTS_S", 0.0)
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.0)
    made = run_dir.create_run("asked")
    made.spec.write_text("version = 1\n")
    return made


class Step:
    """A step of one node that writes the node's result when it is told to stop, or at once."""

    CODE = (
        "import json, signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n"
        "attempt = pathlib.Path(sys.argv[1])\n"
        "while sys.argv[2] == 'waits' and not (attempt / 'stop.json').exists(): time.sleep(0.02)\n"
        "result = {'ending': sys.argv[3], 'step': 5}\n"
        "(attempt / 'results' / 'n1.json').write_text(json.dumps(result))\n"
    )

    @classmethod
    def argv(cls, run: RunDir, how: str, ending: str = "stopped") -> list[str]:
        return [sys.executable, "-c", cls.CODE, str(run.attempt(1).path), how, ending]


def batch_of(run: RunDir, backend: OneJob) -> JobController:
    scheduler = cast(Backend, backend)
    held = claim_attempt(run, JobIdentity("7", 0, ("n1",), None), scheduler)
    return JobController(run, RunSpec(), scheduler, held, Signals())


def answers(run: RunDir) -> list[tuple[bool, str | None]]:
    return [
        (e["accepted"], e.get("reason"))
        for e in events.filter_by_name(events.for_attempt(run.attempt(1)), "requeue_answered")
    ]


def test_a_request_while_the_step_runs_is_taken_with_its_options(run: RunDir) -> None:
    backend = OneJob()
    batch = batch_of(run, backend)
    assert fsio.create_json(run.attempt(1).requeue_request, {"options": {"time": "5"}})
    batch.main(Step.argv(run, "waits"))
    assert answers(run) == [(True, None)] and backend.done == [{"time": "5"}]


@pytest.mark.parametrize(
    ("ending", "done", "answer"),
    [("stopped", [{"time": "5"}], (True, None)), ("completed", [], (False, "all ranks completed"))],
)
def test_a_request_that_comes_when_the_step_is_over_is_answered_by_what_happens(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, ending: str, done: list[Any], answer: Any
) -> None:
    """It is there when batch closes the requests, and was not yet when batch looked last."""
    backend = OneJob()
    batch = batch_of(run, backend)
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 1e9)
    assert fsio.create_json(run.attempt(1).requeue_request, {"options": {"time": "5"}})
    monkeypatch.setattr(JobController, "_poll_step", lambda self, step: None)
    batch.main(Step.argv(run, "goes", ending))
    assert answers(run) == [answer] and backend.done == done


def test_after_the_step_it_is_too_late_for_a_request(run: RunDir) -> None:
    batch_of(run, OneJob()).main(Step.argv(run, "goes", "completed"))
    with pytest.raises(ClusterTrainError, match="too late"):
        continue_run.request_requeue(run, run.attempt(1), {})


def test_an_attempt_that_was_taken_over_ends_its_step_and_decides_nothing(run: RunDir) -> None:
    backend = OneJob()
    batch = batch_of(run, backend)
    run.attempt(2).path.mkdir()
    assert batch.main(Step.argv(run, "waits", "failed")) == EXIT_NO_REQUEUE
    assert (fsio.read_json(run.attempt(1).stop_request) or {}).get("abort")
    log = events.for_attempt(run.attempt(1))
    assert backend.done == [] and events.find_last(log, "ended") is None and events.find_last(log, "stopped") is None
    taken = events.find_last(log, "taken_over")
    assert taken is not None and taken["newer_attempt"] == 2


def test_a_run_whose_folder_was_removed_is_not_started_again(run: RunDir) -> None:
    backend = OneJob()
    batch = batch_of(run, backend)
    argv = [sys.executable, "-c", f"import shutil; shutil.rmtree({str(run.path)!r})"]
    assert batch.main(argv) == EXIT_NO_REQUEUE
    assert backend.done == [] and not run.path.exists()
