"""``requeue``: of two simultaneous commands one succeeds and the other is refused, and no request is lost silently."""

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
from clustertrain.submit import continue_run, requeue_run


class FakeJobs:
    """Stands in for the local backend: records submissions and reports job states."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.running: set[str] = set()
        self.before_submit: Callable[[], object] | None = None

    def submit(self, submission: Submission) -> str:
        callback, self.before_submit = self.before_submit, None
        if callback is not None:
            callback()
        self.submitted.append(f"local-{len(self.submitted) + 2}")
        self.running.add(self.submitted[-1])
        return self.submitted[-1]

    def query_jobs(self, job_ids: Any) -> dict[str, JobView]:
        return {j: JobView(j, "RUNNING" if j in self.running else "FAILED") for j in job_ids}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> FakeJobs:
    fake = FakeJobs()
    monkeypatch.setattr(LocalBackend, "submit", fake.submit)
    monkeypatch.setattr(LocalBackend, "query_jobs", fake.query_jobs)
    monkeypatch.setattr(LocalBackend, "list_starts", lambda _b, _id: [])
    return fake


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: FakeJobs) -> RunDir:
    """A run whose only attempt, by job local-1, was killed."""
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    run = run_dir.create_run("good")
    run.spec.write_text('version = 1\n[job]\nbackend = "local"\n')
    run.attempt(1).events.mkdir(parents=True)
    fsio.write_json(run.attempt(1).record, {"job_id": "local-1", "restart": 0, "nodes": ["a"], "t": clock.now()})
    return run


def call(run: RunDir, *options: str) -> Result:
    return CliRunner().invoke(requeue, [run.id, *options])


def refusal(done: Result) -> str:
    assert isinstance(done.exception, ClusterTrainError), done.output
    return str(done.exception)


def check_record_refusal(run: RunDir) -> None:
    run.checkpoints.mkdir()
    run.rollback_record.write_text("[{")
    message = refusal(call(run))
    assert message.startswith(f"{run.id} cannot resume: {run.rollback_record}: cannot be read: ")
    assert "delete it" in message and "guides/stability/#" in message
    run.rollback_record.unlink()
    run.rollback_record.mkdir()
    message = refusal(call(run))
    assert "is a folder, not a regular file" in message and "delete it" in message


# -- a run that has ended


def test_run_with_a_damaged_record_of_rollbacks_is_not_submitted(run: RunDir, jobs: FakeJobs) -> None:
    check_record_refusal(run)
    assert jobs.submitted == [] and not (run.path / "continued").exists()
    run.rollback_record.rmdir()
    assert call(run).exit_code == 0 and len(jobs.submitted) == 1


def test_second_command_is_refused_while_the_first_submits(run: RunDir, jobs: FakeJobs) -> None:
    second: list[Result] = []
    jobs.before_submit = lambda: second.append(call(run))
    first = call(run)
    assert first.exit_code == 0 and "job local-2" in first.stdout
    message = refusal(second[0])
    assert f"process {os.getpid()}" in message and "is submitting it" in message
    assert jobs.submitted == ["local-2"]


def test_overtaken_command_names_the_other_job(run: RunDir, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    real_status = run_status.run_status
    first: list[Result] = []

    def slow_status(run_: RunDir) -> run_status.RunStatus:
        status = real_status(run_)
        if not first:
            first.append(Result)  # type: ignore[arg-type]  # the call below queries the status too
            first[:] = [call(run)]
        return status

    monkeypatch.setattr(requeue_run, "run_status", slow_status)
    message = refusal(call(run))
    assert first[0].exit_code == 0 and "as job local-2" in message
    assert jobs.submitted == ["local-2"]


def test_run_can_be_continued_again_after_the_other_job_ended(run: RunDir, jobs: FakeJobs) -> None:
    assert call(run).exit_code == 0
    assert "already pending, as job local-2" in refusal(call(run))  # local-2 has not claimed its attempt yet
    jobs.running.clear()
    assert call(run).exit_code == 0
    assert jobs.submitted == ["local-2", "local-3"]


def write_claim(run: RunDir, **fields: Any) -> None:
    (run.path / "continued").mkdir()
    claim = {**continue_run._build_claim(), **fields}
    fsio.write_json(run.path / "continued" / "1.json", claim)


@pytest.mark.parametrize(
    ("fields", "succeeds"),
    [
        ({}, False),
        ({"created": 1.0}, True),  # the process has ended, and another one has its id
        ({"host": "elsewhere"}, False),
        ({"host": "elsewhere", "t": 1.0}, True),
    ],
    ids=["alive", "process-id-reused", "other-host", "other-host-long-ago"],
)
def test_claim_of_a_killed_command_does_not_block(
    run: RunDir, jobs: FakeJobs, fields: dict[str, Any], succeeds: bool
) -> None:
    write_claim(run, **fields)
    done = call(run)
    assert (done.exit_code == 0) == succeeds and bool(jobs.submitted) == succeeds
    if not succeeds:
        assert "is being continued by another command" in refusal(done)


@pytest.mark.parametrize("text", ["", "[1]", '{"pid": -5}', '{"pid": "x", "t": {}, "host": 3}'])
def test_unreadable_claim_does_not_block(run: RunDir, jobs: FakeJobs, text: str) -> None:
    (run.path / "continued").mkdir()
    (run.path / "continued" / "1.json").write_text(text)
    assert call(run).exit_code == 0 and jobs.submitted == ["local-2"]


def test_refused_submission_leaves_the_run_unchanged(run: RunDir, jobs: FakeJobs) -> None:
    fsio.write_json(run.cancel_marker, {"user": "me"})

    def refuse() -> None:
        raise SchedulerError("no such partition")

    jobs.before_submit = refuse
    assert "no such partition" in refusal(call(run))
    assert run.cancel_marker.exists() and list((run.path / "continued").iterdir()) == []
    assert call(run).exit_code == 0 and not run.cancel_marker.exists()


# -- a run that is active


@pytest.fixture
def running(run: RunDir, jobs: FakeJobs) -> RunDir:
    jobs.running.add("local-1")
    return run


def answer(run: RunDir, **fields: Any) -> None:
    log = EventLog(run.attempt(1).events_path("batch"))
    log.write("requeue_answered", **fields)
    log.close()


def test_second_request_with_other_options_is_refused(running: RunDir) -> None:
    answer(running, accepted=True, reason=None)
    assert call(running).exit_code == 0
    message = refusal(call(running, "--time", "1:00:00"))
    assert "is already being requeued without options" in message
    assert f"clustertrain requeue {running.id} --time 1:00:00" in message
    assert call(running).exit_code == 0  # the same request again succeeds
    assert json.loads(running.attempt(1).requeue_request.read_text())["options"] == {}


def test_request_that_would_end_the_run_is_refused(running: RunDir) -> None:
    running.spec.write_text('version = 1\n[job]\nbackend = "local"\nmax_requeues = 0\n')
    assert "would not start again: --max-requeues 0 is used up" in refusal(call(running))
    assert not running.attempt(1).requeue_request.exists()


def test_running_run_with_a_damaged_record_of_rollbacks_is_not_stopped(running: RunDir) -> None:
    check_record_refusal(running)
    assert not running.attempt(1).requeue_request.exists()


def test_request_while_the_attempt_ends_is_refused(running: RunDir) -> None:
    assert fsio.create_json(running.attempt(1).requeue_request, {"too_late": clock.now()})
    assert "too late" in refusal(call(running))


def test_request_without_an_answer_is_an_error(running: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continue_run, "ANSWER_TIMEOUT_S", 0.0)
    assert "has not answered" in refusal(call(running))


def test_rejected_request_reports_the_reason(running: RunDir) -> None:
    answer(running, accepted=False, reason="all ranks completed")
    assert "is not started again: all ranks completed" in refusal(call(running))


def test_request_to_a_run_being_cancelled_is_refused(running: RunDir, jobs: FakeJobs) -> None:
    fsio.write_json(running.cancel_marker, {"user": "me"})
    message = refusal(call(running))
    assert "still being cancelled: job local-1" in message
    assert f"clustertrain wait {running.id}; clustertrain requeue {running.id}" in message
    assert not running.attempt(1).requeue_request.exists() and jobs.submitted == []


# -- a run in the user's own batch script


def test_ended_wrapped_run_is_continued_by_its_own_job(
    run: RunDir, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    requeued: list[str] = []
    problems = ["the job was submitted with --no-requeue"]
    monkeypatch.setattr(LocalBackend, "find_requeue_problem", lambda _b, _id: "".join(problems))
    monkeypatch.setattr(LocalBackend, "requeue", lambda _b, job_id: requeued.append(job_id))
    run.spec.write_text(f"wrapped = true\n{run.spec.read_text()}")
    assert "whose job keeps its options" in refusal(call(run, "--time", "10"))
    message = refusal(call(run))
    assert "--no-requeue" in message and "scontrol update JobId=local-1 Requeue=1" in message
    assert requeued == []
    problems.clear()
    assert "(job local-1)" in call(run).stdout
    assert requeued == ["local-1"] and jobs.submitted == []
    # The scheduler no longer knows the job.
    monkeypatch.setattr(LocalBackend, "requeue", _refuse)
    assert "submit your batch script again" in refusal(call(run))


def _refuse(_backend: LocalBackend, job_id: str) -> None:
    raise SchedulerError(f"Slurm did not requeue job {job_id}: Invalid job id specified")


def test_json_names_the_new_job(run: RunDir, jobs: FakeJobs) -> None:
    assert json.loads(call(run, "--json").stdout) == {
        "schema_version": 1,
        "run": run.id,
        "job_id": "local-2",
        "state": "requeued",
    }
