"""The requeue after an attempt when the scheduler is down, refuses, or already ends the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clustertrain import clock, fsio
from clustertrain.agent import requeue as module
from clustertrain.agent.requeue import RequeueAction
from clustertrain.agent.signals import Signals
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.errors import ClusterTrainError, CommandFailed, SchedulerError
from clustertrain.run import attempts, endings, events, run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import JobView, Submission
from clustertrain.scheduler.requeue_policy import AttemptOutcome, Decision


@dataclass
class FakeScheduler:
    """A scheduler that gives the listed answers in turn (None: accepted) and counts its requests."""

    name: str = "local"
    state: str = "RUNNING"
    answers: list[ClusterTrainError | None] = field(default_factory=list)
    restarts: int = 0
    failing_queries: int = 0  # this many queries fail first
    restart_answers: list[ClusterTrainError | None] = field(default_factory=list)
    requeued: int = 0
    restarted: list[dict[str, str]] = field(default_factory=list)
    requeue_problem: str = ""

    def find_requeue_problem(self, job_id: str) -> str:
        return self.requeue_problem

    def query_jobs(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        if self.failing_queries:
            self.failing_queries -= 1
            raise CommandFailed("squeue failed: Unable to contact slurm controller (connect failure)")
        return {j: JobView(j, self.state, restarts=self.restarts) for j in job_ids}

    def requeue(self, job_id: str) -> None:
        self.requeued += 1
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer

    def restart(self, job_id: str, submission: Submission) -> str:
        answer = self.restart_answers.pop(0) if self.restart_answers else None
        if answer is not None:
            raise answer
        self.restarted.append(dict(submission.options))
        return "8"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    run = run_dir.create_run("followed")
    run.spec.write_text("version = 1\n")
    run.attempt(1).path.mkdir()
    return run


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Signals]:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    yield Signals()


def requeue_after(
    run: RunDir, scheduler: FakeScheduler, signals: Signals, ending: str, decision: Decision, *, patient: bool = True,
    wrapped: bool = False,
) -> int:  # fmt: skip
    log = EventLog(run.attempt(1).events_path("batch"))
    spec = RunSpec(job=JobSpec(exclude="n0"), wrapped=wrapped)
    try:
        deadline = clock.monotonic() + (60.0 if patient else 0.0)
        action = RequeueAction(run, scheduler, "7", spec, log, signals, restart_count=0, deadline=deadline)  # type: ignore[arg-type]
        return action.execute(decision, AttemptOutcome(ending, "…"))
    finally:
        log.close()


REQUEUE = Decision("requeue", "…", 75)


def requeue_methods(run: RunDir) -> list[str]:
    return [str(e["method"]) for e in events.filter_by_name(events.for_attempt(run.attempt(1)), "requeued")]


def test_requeue_is_retried_while_the_scheduler_is_down(run: RunDir, signals: Signals) -> None:
    scheduler = FakeScheduler(answers=[CommandFailed("no answer"), CommandFailed("no answer"), None])
    assert requeue_after(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 75
    assert (scheduler.requeued, scheduler.restarted) == (3, [])


NO_ANSWER = CommandFailed("sbatch failed: Unable to contact slurm controller (connect failure)")


def test_resubmission_without_an_answer_is_retried(run: RunDir, signals: Signals) -> None:
    scheduler = FakeScheduler(failing_queries=2, restart_answers=[NO_ANSWER, NO_ANSWER])
    assert requeue_after(run, scheduler, signals, endings.NODE_FAILURE, Decision("resubmit", "…", 75)) == 75
    assert (scheduler.requeued, len(scheduler.restarted)) == (0, 1)
    assert requeue_methods(run) == ["resubmit"]


def test_scheduler_that_never_answers_stops_the_run(run: RunDir, signals: Signals) -> None:
    scheduler = FakeScheduler(failing_queries=9, answers=[NO_ANSWER], restart_answers=[NO_ANSWER])
    assert requeue_after(run, scheduler, signals, endings.PREEMPTED, REQUEUE, patient=False) == 93
    assert "Unable to contact" in str(attempts.load_attempts(run)[0].stopped)


def test_requeue_done_without_an_answer_makes_no_second_job(run: RunDir, signals: Signals) -> None:
    class RequeueThenSilent(FakeScheduler):
        def requeue(self, job_id: str) -> None:
            if self.requeued:
                self.state = "PENDING"
            super().requeue(job_id)

    scheduler = RequeueThenSilent(answers=[NO_ANSWER, SchedulerError("Job is pending execution for job 7")])
    assert requeue_after(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 75
    assert (scheduler.requeued, scheduler.restarted) == (2, [])


def test_cancellation_ends_the_wait_for_an_answer(
    run: RunDir, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CancelledMeanwhile(FakeScheduler):
        def requeue(self, job_id: str) -> None:
            fsio.write_json(run.cancel_marker, {})
            raise NO_ANSWER

    scheduler = CancelledMeanwhile()
    assert requeue_after(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 93
    assert scheduler.restarted == []


def test_job_that_slurm_requeued_is_not_requeued_again(run: RunDir, signals: Signals) -> None:
    scheduler = FakeScheduler(state="COMPLETING", restarts=1)
    assert requeue_after(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 75
    assert (scheduler.requeued, scheduler.restarted, requeue_methods(run)) == (0, [], ["slurm"])


def test_refused_requeue_becomes_a_resubmission(run: RunDir, signals: Signals) -> None:
    scheduler = FakeScheduler(answers=[SchedulerError("disabled")])
    assert requeue_after(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 75
    assert scheduler.restarted == [{"exclude": "n0"}]
    assert requeue_methods(run) == ["requeue", "resubmit"]


def test_refused_requeue_and_resubmission_stop_the_run(run: RunDir, signals: Signals) -> None:
    scheduler = FakeScheduler(answers=[SchedulerError("disabled")], restart_answers=[SchedulerError("no")])
    assert requeue_after(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 93
    assert "neither" in str(attempts.load_attempts(run)[0].stopped)


def test_job_that_slurm_ends_at_its_limit_is_resubmitted(run: RunDir, signals: Signals) -> None:
    scheduler = FakeScheduler(state="COMPLETING")
    assert requeue_after(run, scheduler, signals, endings.TIME_LIMIT, REQUEUE) == 75
    assert (scheduler.requeued, len(scheduler.restarted)) == (0, 1)


def test_job_that_is_being_cancelled_is_not_requeued(run: RunDir, signals: Signals) -> None:
    scheduler = FakeScheduler(state="COMPLETING")
    assert requeue_after(run, scheduler, signals, endings.UNKNOWN, REQUEUE) == 93
    assert (scheduler.requeued, scheduler.restarted) == (0, [])
    assert attempts.load_attempts(run)[0].stopped


def test_cancellation_after_classification_prevents_the_requeue(run: RunDir, signals: Signals) -> None:
    fsio.write_json(run.cancel_marker, {})
    scheduler = FakeScheduler()
    assert requeue_after(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 93
    assert scheduler.requeued == 0


def test_resubmission_keeps_earlier_exclusions_and_options(run: RunDir, signals: Signals) -> None:
    scheduler = FakeScheduler()
    resubmit = Decision("resubmit", "…", 75, exclude=("n2",))
    requeue_after(run, scheduler, signals, endings.NODE_FAILURE, resubmit)
    by_hand = Decision("resubmit", "…", 75, options={"partition": "big", "exclude": "n[7-9]"})
    requeue_after(run, scheduler, signals, endings.PREEMPTED, by_hand)
    requeue_after(run, scheduler, signals, endings.NODE_FAILURE, Decision("resubmit", "…", 75, exclude=("n5",)))
    assert scheduler.restarted[-1] == {"partition": "big", "exclude": "n0,n2,n[7-9],n5"}


def test_full_disk_does_not_prevent_the_requeue(
    run: RunDir, signals: Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fsio.JsonlAppender, "append", full)
    scheduler = FakeScheduler()
    assert requeue_after(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 75
    assert scheduler.requeued == 1
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scheduler", "ending", "decision", "stopped"),
    [
        (FakeScheduler(), endings.NODE_FAILURE, Decision("resubmit", "…", 75, exclude=("n2",)), ""),
        (FakeScheduler(state="COMPLETING"), endings.TIME_LIMIT, REQUEUE, ""),
        (FakeScheduler(answers=[SchedulerError("disabled")]), endings.PREEMPTED, REQUEUE, "was refused: disabled"),
        (FakeScheduler(requeue_problem="--no-requeue"), endings.PREEMPTED, REQUEUE, "--no-requeue"),
    ],
)
def test_script_of_the_user_s_own_is_only_requeued(
    run: RunDir, signals: Signals, scheduler: FakeScheduler, ending: str, decision: Decision, stopped: str
) -> None:
    code = requeue_after(run, scheduler, signals, ending, decision, wrapped=True)
    assert (code, scheduler.restarted) == (93 if stopped else 75, [])
    assert scheduler.requeued == (0 if scheduler.requeue_problem else 1)
    assert stopped in str(attempts.load_attempts(run)[0].stopped or "")
