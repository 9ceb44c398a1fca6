"""``requeue``: of two at the same moment one counts and the other is told so, and no request is lost in silence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from clustertrain import clock, fsio
from clustertrain.cli.jobs import requeue
from clustertrain.errors import ClusterTrainError, SchedulerError
from clustertrain.run import run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler import run_status
from clustertrain.scheduler.backend import JobView, Submission
from clustertrain.scheduler.local import LocalBackend
from clustertrain.submit import continue_run


class Jobs:
    """What the local backend was given, and what it says of the jobs."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.running: set[str] = set()
        self.meanwhile: Callable[[], object] | None = None

    def submit(self, submission: Submission) -> str:
        act, self.meanwhile = self.meanwhile, None
        if act is not None:
            act()
        self.submitted.append(f"local-{len(self.submitted) + 2}")
        self.running.add(self.submitted[-1])
        return self.submitted[-1]

    def query_jobs(self, job_ids: Any) -> dict[str, JobView]:
        return {j: JobView(j, "RUNNING" if j in self.running else "FAILED") for j in job_ids}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    made = Jobs()
    monkeypatch.setattr(LocalBackend, "submit", made.submit)
    monkeypatch.setattr(LocalBackend, "query_jobs", made.query_jobs)
    monkeypatch.setattr(LocalBackend, "list_starts", lambda _b, _id: [])
    return made


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: Jobs) -> RunDir:
    """Its only attempt, of job local-1, has ended without a word."""
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    made = run_dir.create_run("good")
    made.spec.write_text('version = 1\n[job]\nbackend = "local"\n')
    made.attempt(1).events.mkdir(parents=True)
    fsio.write_json(made.attempt(1).record, {"job_id": "local-1", "restart": 0, "nodes": ["a"], "t": clock.now()})
    return made


def call(run: RunDir, *options: str) -> Result:
    return CliRunner().invoke(requeue, [run.id, *options])


def refusal(done: Result) -> str:
    assert isinstance(done.exception, ClusterTrainError), done.output
    return str(done.exception)


# -- of a run that has ended


def test_while_one_command_submits_another_one_is_refused(run: RunDir, jobs: Jobs) -> None:
    second: list[Result] = []
    jobs.meanwhile = lambda: second.append(call(run))
    first = call(run)
    assert first.exit_code == 0 and "job local-2" in first.stdout
    said = refusal(second[0])
    assert f"process {os.getpid()}" in said and "is submitting it" in said
    assert jobs.submitted == ["local-2"]


def test_a_command_that_is_overtaken_while_it_looks_names_the_others_job(
    run: RunDir, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = run_status.run_status
    first: list[Result] = []

    def slowly(of: RunDir) -> run_status.RunStatus:
        seen = looked(of)
        if not first:
            first.append(Result)  # type: ignore[arg-type]  # the call below looks too
            first[:] = [call(run)]
        return seen

    monkeypatch.setattr(run_status, "run_status", slowly)
    said = refusal(call(run))
    assert first[0].exit_code == 0 and "as job local-2" in said
    assert jobs.submitted == ["local-2"]


def test_once_the_other_job_has_ended_the_run_can_be_continued_again(run: RunDir, jobs: Jobs) -> None:
    assert call(run).exit_code == 0
    assert "already pending, as job local-2" in refusal(call(run))  # it has not claimed its attempt yet
    jobs.running.clear()
    assert call(run).exit_code == 0
    assert jobs.submitted == ["local-2", "local-3"]


def claimed(run: RunDir, **fields: Any) -> None:
    (run.path / "continued").mkdir()
    me = {**continue_run._build_claim(), **fields}
    fsio.write_json(run.path / "continued" / "1.json", me)


@pytest.mark.parametrize(
    ("other", "goes_on"),
    [
        ({}, False),
        ({"created": 1.0}, True),  # the process is gone, and another one has its number
        ({"host": "elsewhere"}, False),
        ({"host": "elsewhere", "t": 1.0}, True),
    ],
)
def test_a_command_that_was_killed_before_it_submitted_holds_nothing(
    run: RunDir, jobs: Jobs, other: dict[str, Any], goes_on: bool
) -> None:
    claimed(run, **other)
    done = call(run)
    assert (done.exit_code == 0) == goes_on and bool(jobs.submitted) == goes_on
    if not goes_on:
        assert "is being continued by another command" in refusal(done)


@pytest.mark.parametrize("text", ["", "[1]", '{"pid": -5}', '{"pid": "x", "t": {}, "host": 3}'])
def test_a_claim_that_does_not_read_holds_nothing(run: RunDir, jobs: Jobs, text: str) -> None:
    (run.path / "continued").mkdir()
    (run.path / "continued" / "1.json").write_text(text)
    assert call(run).exit_code == 0 and jobs.submitted == ["local-2"]


def test_a_submission_that_is_refused_leaves_the_run_as_it_was(run: RunDir, jobs: Jobs) -> None:
    fsio.write_json(run.cancel_marker, {"user": "me"})

    def refuse() -> None:
        raise SchedulerError("no such partition")

    jobs.meanwhile = refuse
    assert "no such partition" in refusal(call(run))
    assert run.cancel_marker.exists() and list((run.path / "continued").iterdir()) == []
    assert call(run).exit_code == 0 and not run.cancel_marker.exists()


# -- of a run that runs


@pytest.fixture
def running(run: RunDir, jobs: Jobs) -> RunDir:
    jobs.running.add("local-1")
    return run


def answer(run: RunDir, **fields: Any) -> None:
    log = EventLog(run.attempt(1).events_path("batch"))
    log.write("requeue_answered", **fields)
    log.close()


def test_of_two_requests_the_one_with_other_options_is_refused_and_says_what_to_type(running: RunDir) -> None:
    answer(running, accepted=True, reason=None)
    assert call(running).exit_code == 0
    said = refusal(call(running, "--time", "1:00:00"))
    assert "is already being requeued without options" in said
    assert f"clustertrain requeue {running.id} --time 1:00:00" in said
    assert call(running).exit_code == 0  # the same request once more: there is nothing to add
    assert json.loads(running.attempt(1).requeue_request.read_text())["options"] == {}


def test_a_request_that_would_end_the_run_is_refused(running: RunDir) -> None:
    running.spec.write_text('version = 1\n[job]\nbackend = "local"\nmax_requeues = 0\n')
    assert "would not start again: --max-requeues 0 is used up" in refusal(call(running))
    assert not running.attempt(1).requeue_request.exists()


def test_a_request_that_comes_when_the_attempt_is_ending_is_refused(running: RunDir) -> None:
    assert fsio.create_json(running.attempt(1).requeue_request, {"too_late": clock.now()})
    assert "too late" in refusal(call(running))


def test_a_request_that_nobody_takes_is_no_success(running: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continue_run, "ANSWER_TIMEOUT_S", 0.0)
    assert "has not answered" in refusal(call(running))


def test_a_request_that_the_ending_of_the_run_overtakes_says_why(running: RunDir) -> None:
    answer(running, accepted=False, reason="all ranks completed")
    assert "is not started again: all ranks completed" in refusal(call(running))


def test_a_run_that_is_being_cancelled_takes_no_request(running: RunDir, jobs: Jobs) -> None:
    fsio.write_json(running.cancel_marker, {"user": "me"})
    said = refusal(call(running))
    assert "still being cancelled: job local-1" in said
    assert f"clustertrain wait {running.id}; clustertrain requeue {running.id}" in said
    assert not running.attempt(1).requeue_request.exists() and jobs.submitted == []
