"""How the batch process handles a `requeue` request, a newer attempt, and a removed run folder."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from clustertrain import fsio
from clustertrain.agent import batch_process as module
from clustertrain.agent.batch_process import BatchProcess
from clustertrain.agent.claim import JobIdentity, claim_attempt
from clustertrain.agent.signals import Signals
from clustertrain.config.job import RunSpec
from clustertrain.errors import EXIT_NO_REQUEUE, ClusterTrainError
from clustertrain.run import events, run_dir
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import Backend, JobView
from clustertrain.submit import continue_run

pytestmark = pytest.mark.long


class FakeBackend:
    """A backend whose job 7 runs forever. It records its requests."""

    name = "slurm"

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def query_jobs(self, job_ids: Any) -> dict[str, JobView]:
        return {j: JobView(j, "RUNNING") for j in job_ids if j == "7"}

    def list_starts(self, job_id: str) -> list[Any]:
        return []

    def requeue(self, job_id: str) -> None:
        self.requests.append("requeue")
        os.kill(os.getpid(), signal.SIGTERM)  # as Slurm does

    def restart(self, job_id: str, submission: Any) -> str:
        self.requests.append(dict(submission.options))
        return "8"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    monkeypatch.setattr(module, "LATE_RESULTS_S", 0.0)
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.0)
    run = run_dir.create_run("asked")
    run.spec.write_text("version = 1\n")
    return run


class Step:
    """A step on one node that writes the node's result on a request to stop, or at once."""

    CODE = (
        "import json, signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n"
        "attempt = pathlib.Path(sys.argv[1])\n"
        "while sys.argv[2] == 'waits' and not (attempt / 'stop.json').exists(): time.sleep(0.02)\n"
        "result = {'ending': sys.argv[3], 'step': 5}\n"
        "(attempt / 'results' / 'n1.json').write_text(json.dumps(result))\n"
    )

    @classmethod
    def argv(cls, run: RunDir, mode: str, ending: str = "stopped") -> list[str]:
        return [sys.executable, "-c", cls.CODE, str(run.attempt(1).path), mode, ending]


def start_batch(run: RunDir, backend: FakeBackend) -> BatchProcess:
    scheduler = cast(Backend, backend)
    held = claim_attempt(run, JobIdentity("7", 0, ("n1",), None), scheduler)
    return BatchProcess(run, RunSpec(), scheduler, held, Signals())


def answers(run: RunDir) -> list[tuple[bool, str | None]]:
    return [
        (e["accepted"], e.get("reason"))
        for e in events.filter_by_name(events.for_attempt(run.attempt(1)), "requeue_answered")
    ]


def test_request_during_the_step_is_accepted_with_its_options(run: RunDir) -> None:
    backend = FakeBackend()
    batch = start_batch(run, backend)
    assert fsio.create_json(run.attempt(1).requeue_request, {"options": {"time": "5"}})
    batch.main(Step.argv(run, "waits"))
    assert answers(run) == [(True, None)] and backend.requests == [{"time": "5"}]


@pytest.mark.parametrize(
    ("ending", "requests", "answer"),
    [("stopped", [{"time": "5"}], (True, None)), ("completed", [], (False, "all ranks completed"))],
)
def test_answer_to_a_request_after_the_step_depends_on_its_ending(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, ending: str, requests: list[Any], answer: Any
) -> None:
    """The request arrives after the last check for requests and before they are closed."""
    backend = FakeBackend()
    batch = start_batch(run, backend)
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 1e9)
    assert fsio.create_json(run.attempt(1).requeue_request, {"options": {"time": "5"}})
    monkeypatch.setattr(BatchProcess, "_poll_step", lambda self, step: None)
    batch.main(Step.argv(run, "ends", ending))
    assert answers(run) == [answer] and backend.requests == requests


def test_request_after_the_attempt_ended_is_too_late(run: RunDir) -> None:
    start_batch(run, FakeBackend()).main(Step.argv(run, "ends", "completed"))
    with pytest.raises(ClusterTrainError, match="too late"):
        continue_run.request_requeue(run, run.attempt(1), {})


def test_attempt_that_was_taken_over_aborts_without_a_decision(run: RunDir) -> None:
    backend = FakeBackend()
    batch = start_batch(run, backend)
    run.attempt(2).path.mkdir()
    assert batch.main(Step.argv(run, "waits", "failed")) == EXIT_NO_REQUEUE
    assert (fsio.read_json(run.attempt(1).stop_request) or {}).get("abort")
    log = events.for_attempt(run.attempt(1))
    assert (
        backend.requests == [] and events.find_last(log, "ended") is None and events.find_last(log, "stopped") is None
    )
    takeover = events.find_last(log, "taken_over")
    assert takeover is not None and takeover["newer_attempt"] == 2


def test_run_whose_folder_was_removed_is_not_requeued(run: RunDir) -> None:
    backend = FakeBackend()
    batch = start_batch(run, backend)
    argv = [sys.executable, "-c", f"import shutil; shutil.rmtree({str(run.path)!r})"]
    assert batch.main(argv) == EXIT_NO_REQUEUE
    assert backend.requests == [] and not run.path.exists()
