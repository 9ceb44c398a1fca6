"""What is true of a run: its own files, the queue, and what the accounting remembers."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.errors import CommandFailed
from clustertrain.report import status, terminal
from clustertrain.report.plan_vs_measured import PlanAccuracy
from clustertrain.run import run_dir, state
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler import run_status as looking
from clustertrain.scheduler.backend import JobStart, JobView
from clustertrain.scheduler.slurm import SlurmBackend


class Scheduler(SlurmBackend):
    """Answers what the test wants; ``queue`` None: it gives no answer."""

    def __init__(self) -> None:
        self.queue: dict[str, JobView] | None = {}
        self.remembered: list[JobStart] = []

    def query_jobs(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        if self.queue is None:
            raise CommandFailed("squeue failed: Unable to contact slurm controller")
        return {j: self.queue[j] for j in job_ids if j in self.queue}

    def list_starts(self, job_id: str) -> list[JobStart]:
        return [s for s in self.remembered if s.job_id == job_id]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made = Scheduler()
    monkeypatch.setattr(looking, "backend_for_run", lambda _name: made)
    return made


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    return new_run()


def new_run() -> RunDir:
    made = run_dir.create_run("r")
    made.spec.write_text("version = 1\n")
    say(made.events / "submit.jsonl", (1.0, "submitted", {"job_id": "7", "backend": "slurm"}))
    return made


def say(path: Path, *events: tuple[float, str, dict[str, Any]]) -> None:
    log = fsio.JsonlAppender(path)
    for t, name, fields in events:
        log.append({"t": t, "event": name, **fields})
    log.close()


def attempt(run: RunDir, *events: tuple[float, str, dict[str, Any]]) -> None:
    run.attempt(1).path.mkdir(parents=True, exist_ok=True)
    fsio.write_json(run.attempt(1).record, {"job_id": "7", "restart": 0, "nodes": ["a"], "host": "a", "t": 2.0})
    say(run.attempt(1).events_path("batch"), (2.0, "started", {"job_id": "7"}), *events)


PREEMPTED = (3.0, "ended", {"ending": "preempted", "reason": "the scheduler preempted the job"})
REQUEUED = (4.0, "requeued", {"method": "requeue", "job_id": "7"})
STOPPED = (4.0, "stopped", {"reason": "no progress"})


def test_no_answer_does_not_end_a_requeued_run(run: RunDir, scheduler: Scheduler) -> None:
    attempt(run, PREEMPTED, REQUEUED)
    scheduler.queue = None
    seen = looking.run_status(run)
    assert (seen.state, seen.is_final) == (state.REQUEUED, False)
    assert seen.scheduler_error is not None


def test_no_answer_leaves_a_waiting_and_a_running_run_as_they_were(run: RunDir, scheduler: Scheduler) -> None:
    scheduler.queue = None
    assert looking.run_status(run).state == state.PENDING
    attempt(run)
    assert looking.run_status(run).state == state.RUNNING


def test_no_answer_changes_nothing_of_what_the_files_say(run: RunDir, scheduler: Scheduler) -> None:
    attempt(run, PREEMPTED, STOPPED)
    scheduler.queue = None
    assert looking.run_status(run).state == state.FAILED
    fsio.write_json(run.cancel_marker, {"t": 5.0})
    assert looking.run_status(run).state == state.CANCELLED


def test_no_answer_does_not_end_a_run_that_its_owner_continued(run: RunDir, scheduler: Scheduler) -> None:
    attempt(run, PREEMPTED, STOPPED)
    say(run.events / "continued-h-1.jsonl", (5.0, "continued", {}), (5.1, "continued", {"job_id": "8"}))
    scheduler.queue = None
    assert looking.run_status(run).state == state.REQUEUED


def test_a_requeued_run_that_was_cancelled_in_the_queue_stays_cancelled(run: RunDir, scheduler: Scheduler) -> None:
    attempt(run, PREEMPTED, REQUEUED)
    scheduler.remembered = [JobStart("7", "PREEMPTED", start=2.0), JobStart("7", "CANCELLED")]
    scheduler.queue = {"7": JobView("7", "CANCELLED")}
    assert looking.run_status(run).state == state.CANCELLED
    scheduler.queue = {}  # the queue forgets a job after some minutes
    assert looking.run_status(run).state == state.CANCELLED
    scheduler.queue = None
    assert looking.run_status(run).state == state.CANCELLED


def test_a_requeued_job_that_is_gone_for_another_reason_has_failed(run: RunDir, scheduler: Scheduler) -> None:
    attempt(run, PREEMPTED, REQUEUED)
    scheduler.remembered = [JobStart("7", "PREEMPTED", start=2.0)]
    assert looking.run_status(run).state == state.FAILED


def test_a_run_that_nobody_decided_about_says_what_continues_it(run: RunDir, scheduler: Scheduler) -> None:
    # kill -9 of the batch process, as squeue and sacct of 22.05 show it.
    attempt(run, (3.0, "checkpoint", {"step": 40}))
    scheduler.queue = {"7": JobView("7", "FAILED", reason="JobLaunchFailure")}
    scheduler.remembered = [JobStart("7", "FAILED", start=2.0, signal=9)]
    seen = looking.run_status(run)
    assert seen.state == state.FAILED
    assert "attempt 1 ended without a decision" in str(seen.undecided_reason)
    assert seen.continue_command == f"clustertrain requeue {run.id}"
    # A home that was read-only when the job started again: slurmstepd cannot open job.log.
    attempt(run, PREEMPTED, REQUEUED)
    assert "job 7 ended before attempt 2 began (the scheduler reports JobLaunchFailure)" in str(
        looking.run_status(run).undecided_reason
    )
    attempt(run, STOPPED)
    assert looking.run_status(run).undecided_reason is None
    assert looking.run_status(run).continue_command is None


@pytest.mark.parametrize(
    ("state_", "reason", "command"),
    [
        ("PENDING", "launch failed requeued held", "scontrol release 7"),
        ("PENDING", "JobHeldUser", "scontrol release 7"),
        ("PENDING", "JobHoldMaxRequeue", "scontrol release 7"),
        ("PENDING", "JobHeldAdmin", None),
        ("PENDING", "Resources", None),
        ("RUNNING", "None", None),
    ],
)
def test_a_job_that_is_held_says_how_to_release_it(
    run: RunDir, scheduler: Scheduler, state_: str, reason: str, command: str | None
) -> None:
    scheduler.queue = {"7": JobView("7", state_, reason=reason)}
    assert looking.run_status(run).continue_command == command


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("reason", ["NonZeroExitCode", "RaisedSignal:9(Killed)", "JobLaunchFailure", ""])
def test_the_command_that_continues_a_run_is_never_broken(
    run: RunDir, scheduler: Scheduler, width: int, reason: str
) -> None:
    attempt(run, (3.0, "checkpoint", {"step": 40}))
    scheduler.queue = {"7": JobView("7", "FAILED", reason=reason)}
    seen = looking.run_status(run)
    out = io.StringIO()
    console = terminal.make_console(out, width)
    terminal.emit(console, status.render(seen, PlanAccuracy(), width, terminal.ASCII))
    terminal.emit(console, *status.format_remarks([seen]))
    assert out.getvalue().count(f"  clustertrain requeue {run.id}\n") == 2


@pytest.mark.parametrize("spec", ["version = [", "nonsense = 1\n", b"\xff\xfe"])
@pytest.mark.parametrize("submitted", [True, False])
def test_a_run_that_does_not_read_hides_no_other(
    run: RunDir, scheduler: Scheduler, spec: str | bytes, submitted: bool
) -> None:
    broken = new_run()
    broken.spec.write_bytes(spec if isinstance(spec, bytes) else spec.encode())
    if not submitted:
        (broken.events / "submit.jsonl").unlink()
    scheduler.queue = {"7": JobView("7", "PENDING")}
    first, second = looking.run_statuses([broken, run])
    assert isinstance(first, looking.Unreadable) and first.run == broken and "spec.toml" in first.error
    assert isinstance(second, looking.RunStatus) and second.state == state.PENDING
