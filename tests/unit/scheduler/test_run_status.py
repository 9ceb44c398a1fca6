"""The status of a run, from its files, the queue and the accounting."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.cli.jobs import wait_for
from clustertrain.errors import CommandFailed
from clustertrain.report import status, terminal
from clustertrain.report.plan_vs_measured import PlanAccuracy
from clustertrain.report.progress import Progress
from clustertrain.run import run_dir, state
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler import run_status as run_status_module
from clustertrain.scheduler.backend import JobStart, JobView
from clustertrain.scheduler.run_status import RunStatus
from clustertrain.scheduler.slurm import SlurmBackend


class FakeScheduler(SlurmBackend):
    """A scheduler that answers with the test's jobs and starts. With ``queue`` None it gives no answer."""

    def __init__(self) -> None:
        self.queue: dict[str, JobView] | None = {}
        self.past_starts: list[JobStart] = []
        self.before_answer: Callable[[], None] = lambda: None

    def query_jobs(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        self.before_answer()
        if self.queue is None:
            raise CommandFailed("squeue failed: Unable to contact slurm controller")
        return {j: self.queue[j] for j in job_ids if j in self.queue}

    def list_starts(self, job_id: str) -> list[JobStart]:
        return [s for s in self.past_starts if s.job_id == job_id]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    fake = FakeScheduler()
    monkeypatch.setattr(run_status_module, "backend_for_run", lambda _name: fake)
    return fake


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    return new_run()


def new_run() -> RunDir:
    run = run_dir.create_run("r")
    run.spec.write_text("version = 1\n")
    write_events(run.events / "submit.jsonl", (1.0, "submitted", {"job_id": "7", "backend": "slurm"}))
    return run


def write_events(path: Path, *events: tuple[float, str, dict[str, Any]]) -> None:
    log = fsio.JsonlAppender(path)
    for t, name, fields in events:
        log.append({"t": t, "event": name, **fields})
    log.close()


def write_attempt(run: RunDir, *events: tuple[float, str, dict[str, Any]]) -> None:
    run.attempt(1).path.mkdir(parents=True, exist_ok=True)
    fsio.write_json(run.attempt(1).record, {"job_id": "7", "restart": 0, "nodes": ["a"], "host": "a", "t": 2.0})
    write_events(run.attempt(1).events_path("batch"), (2.0, "started", {"job_id": "7"}), *events)


PREEMPTED = (3.0, "ended", {"ending": "preempted", "reason": "the scheduler preempted the job"})
REQUEUED = (4.0, "requeued", {"method": "requeue", "job_id": "7"})
STOPPED = (4.0, "stopped", {"reason": "no progress"})


def test_requeued_run_stays_requeued_without_an_answer(run: RunDir, scheduler: FakeScheduler) -> None:
    write_attempt(run, PREEMPTED, REQUEUED)
    scheduler.queue = None
    status_of_run = run_status_module.run_status(run)
    assert (status_of_run.state, status_of_run.is_final) == (state.REQUEUED, False)
    assert status_of_run.scheduler_error is not None


def test_pending_and_running_runs_stay_so_without_an_answer(run: RunDir, scheduler: FakeScheduler) -> None:
    scheduler.queue = None
    assert run_status_module.run_status(run).state == state.PENDING
    write_attempt(run)
    assert run_status_module.run_status(run).state == state.RUNNING


def test_final_states_come_from_the_files_without_an_answer(run: RunDir, scheduler: FakeScheduler) -> None:
    write_attempt(run, PREEMPTED, STOPPED)
    scheduler.queue = None
    assert run_status_module.run_status(run).state == state.FAILED
    fsio.write_json(run.cancel_marker, {"t": 5.0})
    assert run_status_module.run_status(run).state == state.CANCELLED


def test_run_that_completes_during_the_query_is_completed(run: RunDir, scheduler: FakeScheduler) -> None:
    write_attempt(run)
    scheduler.queue = {"7": JobView("7", "COMPLETED")}
    completed = (3.0, "ended", {"ending": "completed", "reason": "all ranks completed"})
    scheduler.before_answer = lambda: write_events(run.attempt(1).events_path("batch"), completed)
    assert run_status_module.run_status(run).state == state.COMPLETED


@pytest.mark.parametrize(
    "query",
    [run_status_module.run_status, lambda run: run_status_module.run_statuses([run])[0]],
    ids=["one run", "list"],
)
def test_run_that_continues_as_another_job_during_the_query_is_not_failed(
    run: RunDir, scheduler: FakeScheduler, query: Callable[[RunDir], RunStatus]
) -> None:
    write_attempt(run, PREEMPTED, STOPPED)
    scheduler.queue = {"7": JobView("7", "COMPLETED"), "8": JobView("8", "PENDING")}
    continued: list[tuple[float, str, dict[str, Any]]] = [(5.0, "continued", {}), (5.1, "continued", {"job_id": "8"})]
    scheduler.before_answer = lambda: write_events(run.events / "continued-h-1.jsonl", *continued)
    status_of_run = query(run)
    assert (status_of_run.state, status_of_run.job_id) == (state.REQUEUED, "8")


def test_continued_run_is_requeued_without_an_answer(run: RunDir, scheduler: FakeScheduler) -> None:
    write_attempt(run, PREEMPTED, STOPPED)
    write_events(run.events / "continued-h-1.jsonl", (5.0, "continued", {}), (5.1, "continued", {"job_id": "8"}))
    scheduler.queue = None
    assert run_status_module.run_status(run).state == state.REQUEUED


def test_run_cancelled_in_the_queue_stays_cancelled(run: RunDir, scheduler: FakeScheduler) -> None:
    write_attempt(run, PREEMPTED, REQUEUED)
    scheduler.past_starts = [JobStart("7", "PREEMPTED", start=2.0), JobStart("7", "CANCELLED")]
    scheduler.queue = {"7": JobView("7", "CANCELLED")}
    assert run_status_module.run_status(run).state == state.CANCELLED
    scheduler.queue = {}  # squeue forgets a job after some minutes
    assert run_status_module.run_status(run).state == state.CANCELLED
    scheduler.queue = None
    assert run_status_module.run_status(run).state == state.CANCELLED


def test_requeued_job_that_disappeared_has_failed(run: RunDir, scheduler: FakeScheduler) -> None:
    write_attempt(run, PREEMPTED, REQUEUED)
    scheduler.past_starts = [JobStart("7", "PREEMPTED", start=2.0)]
    assert run_status_module.run_status(run).state == state.FAILED


def test_undecided_run_names_the_command_that_continues_it(run: RunDir, scheduler: FakeScheduler) -> None:
    # kill -9 of the batch process, as squeue and sacct of Slurm 22.05 show it.
    write_attempt(run, (3.0, "checkpoint", {"step": 40}))
    scheduler.queue = {"7": JobView("7", "FAILED", reason="JobLaunchFailure")}
    scheduler.past_starts = [JobStart("7", "FAILED", start=2.0, signal=9)]
    status_of_run = run_status_module.run_status(run)
    assert status_of_run.state == state.FAILED
    assert "attempt 1 ended before its batch process decided" in str(status_of_run.undecided_reason)
    assert status_of_run.continue_command == f"clustertrain requeue {run.id}"
    # The home folder was read-only when the job started again, so slurmstepd could not open job.log.
    write_attempt(run, PREEMPTED, REQUEUED)
    assert "job 7 ended before attempt 2 began (the scheduler reports JobLaunchFailure)" in str(
        run_status_module.run_status(run).undecided_reason
    )
    write_attempt(run, STOPPED)
    assert run_status_module.run_status(run).undecided_reason is None
    assert run_status_module.run_status(run).continue_command is None


def test_run_without_a_job_says_so(run: RunDir, scheduler: FakeScheduler) -> None:
    """Its submission was killed between the run's folder and the job."""
    run = run_dir.create_run("no-job")
    run.spec.write_text('version = 1\n[job]\nbackend = "slurm"\n')
    run_status = run_status_module.run_status(run)
    assert (run_status.state, run_status.job_id) == (state.FAILED, None)
    assert run_status.undecided_reason == "its submission was interrupted: no job is recorded"
    assert run_status.continue_command == f"clustertrain requeue {run.id}"


def test_wait_names_why_a_run_did_not_complete(
    run: RunDir, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = "the command ended with exit code 3: see attempts/001/logs/rank-0.log"
    budget = "no progress: 3 attempts in a row committed no newer step"
    quoting, completed = new_run(), new_run()
    ended = (3.0, "ended", {"ending": "crash", "reason": failure})
    write_attempt(run, ended, (4.0, "stopped", {"reason": budget}))
    write_attempt(quoting, ended, (4.0, "stopped", {"reason": f"{failure}; a requeue would fail the same way"}))
    write_attempt(completed, (3.0, "ended", {"ending": "completed", "reason": "all ranks completed"}))
    assert wait_for([run, quoting, completed], "sweep") == 1
    assert capsys.readouterr().err.splitlines() == [
        f"{run.id}: failed: {budget}; {failure}",
        f"{quoting.id}: failed: {failure}; a requeue would fail the same way",
        f"{completed.id}: completed",
    ]


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
def test_held_job_names_the_command_that_releases_it(
    run: RunDir, scheduler: FakeScheduler, state_: str, reason: str, command: str | None
) -> None:
    scheduler.queue = {"7": JobView("7", state_, reason=reason)}
    assert run_status_module.run_status(run).continue_command == command


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("reason", ["NonZeroExitCode", "RaisedSignal:9(Killed)", "JobLaunchFailure", ""])
def test_command_that_continues_a_run_is_never_wrapped(
    run: RunDir, scheduler: FakeScheduler, width: int, reason: str
) -> None:
    write_attempt(run, (3.0, "checkpoint", {"step": 40}))
    scheduler.queue = {"7": JobView("7", "FAILED", reason=reason)}
    status_of_run = run_status_module.run_status(run)
    out = io.StringIO()
    console = terminal.make_console(out, width)
    terminal.emit(console, status.render(status_of_run, Progress(), PlanAccuracy(), width, terminal.ASCII, 0.0))
    terminal.emit(console, *status.format_remarks([status_of_run]))
    assert out.getvalue().count(f"  clustertrain requeue {run.id}\n") == 2


@pytest.mark.parametrize("spec", ["version = [", "nonsense = 1\n", b"\xff\xfe"])
@pytest.mark.parametrize("submitted", [True, False])
def test_unreadable_run_does_not_hide_other_runs(
    run: RunDir, scheduler: FakeScheduler, spec: str | bytes, submitted: bool
) -> None:
    broken = new_run()
    broken.spec.write_bytes(spec if isinstance(spec, bytes) else spec.encode())
    if not submitted:
        (broken.events / "submit.jsonl").unlink()
    scheduler.queue = {"7": JobView("7", "PENDING")}
    first, second = run_status_module.run_statuses([broken, run])
    assert isinstance(first, run_status_module.Unreadable) and first.run == broken and "spec.toml" in first.error
    assert isinstance(second, run_status_module.RunStatus) and second.state == state.PENDING
