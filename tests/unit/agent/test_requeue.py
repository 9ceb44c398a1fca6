"""What follows an attempt, with a scheduler that is down, refuses, or is ending the job already."""

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
from clustertrain.scheduler.requeue_policy import Decision, Verdict


@dataclass
class Scheduler:
    """Answers a requeue with these in turn (None: agreed), and remembers what it was asked."""

    name: str = "local"
    state: str = "RUNNING"
    answers: list[ClusterTrainError | None] = field(default_factory=list)
    restarts: int = 0
    views_fail: int = 0  # the first so many questions get no answer
    restart_answers: list[ClusterTrainError | None] = field(default_factory=list)
    requeued: int = 0
    restarted: list[dict[str, str]] = field(default_factory=list)

    def query_jobs(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        if self.views_fail:
            self.views_fail -= 1
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
    made = run_dir.create_run("followed")
    made.spec.write_text("version = 1\n")
    made.attempt(1).path.mkdir()
    return made


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Signals]:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    yield Signals()


def follow(
    run: RunDir, scheduler: Scheduler, signals: Signals, ending: str, decision: Decision, *, patient: bool = True
) -> int:
    log = EventLog(run.attempt(1).events_path("batch"))
    spec = RunSpec(job=JobSpec(exclude="n0"))
    try:
        until = clock.monotonic() + (60.0 if patient else 0.0)
        sequel = RequeueAction(run, scheduler, "7", spec, log, signals, restart_count=0, deadline=until)  # type: ignore[arg-type]
        return sequel.execute(decision, Verdict(ending, "…"))
    finally:
        log.close()


REQUEUE = Decision("requeue", "…", 75)


def how(run: RunDir) -> list[str]:
    return [str(e["method"]) for e in events.filter_by_name(events.for_attempt(run.attempt(1)), "requeued")]


def test_a_scheduler_that_is_restarting_is_asked_again(run: RunDir, signals: Signals) -> None:
    scheduler = Scheduler(answers=[CommandFailed("no answer"), CommandFailed("no answer"), None])
    assert follow(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 75
    assert (scheduler.requeued, scheduler.restarted) == (3, [])


NOTHING_HEARD = CommandFailed("sbatch failed: Unable to contact slurm controller (connect failure)")


def test_a_fresh_submission_without_an_answer_is_made_again(run: RunDir, signals: Signals) -> None:
    scheduler = Scheduler(views_fail=2, restart_answers=[NOTHING_HEARD, NOTHING_HEARD])
    assert follow(run, scheduler, signals, endings.NODE_FAILURE, Decision("resubmit", "…", 75)) == 75
    assert (scheduler.requeued, len(scheduler.restarted)) == (0, 1)
    assert how(run) == ["resubmit"]


def test_a_scheduler_that_never_answers_stops_the_run_in_the_end(run: RunDir, signals: Signals) -> None:
    scheduler = Scheduler(views_fail=9, answers=[NOTHING_HEARD], restart_answers=[NOTHING_HEARD])
    assert follow(run, scheduler, signals, endings.PREEMPTED, REQUEUE, patient=False) == 93
    assert "Unable to contact" in str(attempts.load_attempts(run)[0].stopped)


def test_a_requeue_that_was_heard_without_an_answer_makes_no_second_job(run: RunDir, signals: Signals) -> None:
    class Deaf(Scheduler):
        def requeue(self, job_id: str) -> None:
            if self.requeued:
                self.state = "PENDING"
            super().requeue(job_id)

    scheduler = Deaf(answers=[NOTHING_HEARD, SchedulerError("Job is pending execution for job 7")])
    assert follow(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 75
    assert (scheduler.requeued, scheduler.restarted) == (2, [])


def test_a_cancellation_ends_the_wait_for_an_answer(
    run: RunDir, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(Scheduler):
        def requeue(self, job_id: str) -> None:
            fsio.write_json(run.cancel_marker, {})
            raise NOTHING_HEARD

    scheduler = Away()
    assert follow(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 93
    assert scheduler.restarted == []


def test_a_job_that_was_requeued_from_outside_is_not_requeued_again(run: RunDir, signals: Signals) -> None:
    scheduler = Scheduler(state="COMPLETING", restarts=1)
    assert follow(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 75
    assert (scheduler.requeued, scheduler.restarted, how(run)) == (0, [], ["slurm"])


def test_a_refused_requeue_becomes_a_fresh_submission(run: RunDir, signals: Signals) -> None:
    scheduler = Scheduler(answers=[SchedulerError("disabled")])
    assert follow(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 75
    assert scheduler.restarted == [{"exclude": "n0"}]
    assert how(run) == ["requeue", "resubmit"]


def test_a_run_that_nobody_takes_says_why_it_stops(run: RunDir, signals: Signals) -> None:
    scheduler = Scheduler(answers=[SchedulerError("disabled")], restart_answers=[SchedulerError("no")])
    assert follow(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 93
    assert "neither" in str(attempts.load_attempts(run)[0].stopped)


def test_a_job_at_its_limit_is_submitted_afresh(run: RunDir, signals: Signals) -> None:
    scheduler = Scheduler(state="COMPLETING")
    assert follow(run, scheduler, signals, endings.TIME_LIMIT, REQUEUE) == 75
    assert (scheduler.requeued, len(scheduler.restarted)) == (0, 1)


def test_a_job_that_is_being_cancelled_is_left_alone(run: RunDir, signals: Signals) -> None:
    scheduler = Scheduler(state="COMPLETING")
    assert follow(run, scheduler, signals, endings.UNKNOWN, REQUEUE) == 93
    assert (scheduler.requeued, scheduler.restarted) == (0, [])
    assert attempts.load_attempts(run)[0].stopped


def test_a_cancellation_after_the_verdict_counts(run: RunDir, signals: Signals) -> None:
    fsio.write_json(run.cancel_marker, {})
    scheduler = Scheduler()
    assert follow(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 93
    assert scheduler.requeued == 0


def test_nodes_and_options_of_earlier_submissions_are_remembered(run: RunDir, signals: Signals) -> None:
    scheduler = Scheduler()
    first = Decision("resubmit", "…", 75, exclude=("n2",))
    follow(run, scheduler, signals, endings.NODE_FAILURE, first)
    by_hand = Decision("resubmit", "…", 75, options={"partition": "big", "exclude": "n[7-9]"})
    follow(run, scheduler, signals, endings.PREEMPTED, by_hand)
    follow(run, scheduler, signals, endings.NODE_FAILURE, Decision("resubmit", "…", 75, exclude=("n5",)))
    assert scheduler.restarted[-1] == {"partition": "big", "exclude": "n0,n2,n[7-9],n5"}


def test_a_full_disk_does_not_keep_the_run_from_its_requeue(
    run: RunDir, signals: Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fsio.JsonlAppender, "append", full)
    scheduler = Scheduler()
    assert follow(run, scheduler, signals, endings.PREEMPTED, REQUEUE) == 75
    assert scheduler.requeued == 1
    assert "No space left" in capsys.readouterr().err
