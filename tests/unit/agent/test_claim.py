"""Starting an attempt: what earlier ones left open is closed, and never do two own the run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clustertrain import fsio
from clustertrain.agent import claim as module
from clustertrain.agent.claim import Identity, claim
from clustertrain.errors import NotOwner
from clustertrain.launch.backend import JobStart, JobView, Submission
from clustertrain.run import attempts, folder
from clustertrain.run.folder import RunDir


@dataclass
class FakeScheduler:
    """Says what a test wants it to say."""

    name: str = "slurm"
    jobs: dict[str, JobView] = field(default_factory=dict)
    past: dict[str, list[JobStart]] = field(default_factory=dict)

    def views(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        return {j: self.jobs[j] for j in job_ids if j in self.jobs}

    def starts(self, job_id: str) -> list[JobStart]:
        return self.past.get(job_id, [])

    def submit(self, submission: Submission) -> str:
        raise AssertionError("a claim submits nothing")

    def cancel(self, job_id: str) -> None:
        raise AssertionError("a claim cancels nothing")

    requeue = cancel

    def restart(self, job_id: str, submission: Submission) -> str:
        raise AssertionError("a claim restarts nothing")

    def advice(self, partition: str) -> list[str]:
        return []

    def own_job_id(self, environ: Mapping[str, str]) -> str | None:
        return None

    def own_nodes(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        return ()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    made = folder.create("claimed")
    made.spec.write_text("version = 1\n")
    return made


def me(job_id: str = "7", restart: int = 0) -> Identity:
    return Identity(job_id, restart, ("n1", "n2"), None)


def test_attempts_are_numbered_from_one(run: RunDir) -> None:
    held = claim(run, me(), FakeScheduler())
    assert held.attempt.n == 1
    assert fsio.read_json(held.attempt.record)["job_id"] == "7"


@pytest.mark.parametrize(
    ("word", "ending"),
    [
        ("NODE_FAIL", "node_failure"),
        ("PREEMPTED", "preempted"),
        ("TIMEOUT", "time_limit"),
        ("REQUEUED", "preempted"),
        ("FAILED", "unknown"),
    ],
)
def test_a_restart_closes_the_attempt_that_died_with_its_node(run: RunDir, word: str, ending: str) -> None:
    claim(run, me(), FakeScheduler())
    began = attempts.read_all(run)[0].start
    rows = [JobStart("7", word, start=began, end=began), JobStart("7", "RUNNING", start=began + 100 if began else None)]
    held = claim(run, me(restart=1), FakeScheduler(past={"7": rows}))
    assert held.attempt.n == 2
    closed = attempts.read_all(run)[0]
    assert (closed.ending, closed.requeued) == (ending, "slurm")


def test_the_same_start_never_claims_twice(run: RunDir) -> None:
    claim(run, me(), FakeScheduler())
    with pytest.raises(NotOwner):
        claim(run, me(), FakeScheduler())


def test_a_second_job_leaves_while_the_first_one_runs(run: RunDir) -> None:
    claim(run, me("7"), FakeScheduler())
    with pytest.raises(NotOwner, match="held by job 7"):
        claim(run, me("8"), FakeScheduler(jobs={"7": JobView("7", "RUNNING")}))


@pytest.mark.parametrize("state", [None, "PENDING", "NODE_FAIL", "CANCELLED"])
def test_a_second_job_takes_over_once_the_first_is_over(run: RunDir, state: str | None) -> None:
    claim(run, me("7"), FakeScheduler())
    jobs = {"7": JobView("7", state)} if state else {}
    assert claim(run, me("8"), FakeScheduler(jobs=jobs)).attempt.n == 2


def test_a_job_that_never_leaves_completing_keeps_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPLETING_S", 0.0)
    claim(run, me("7"), FakeScheduler())
    with pytest.raises(NotOwner, match="does not end"):
        claim(run, me("8"), FakeScheduler(jobs={"7": JobView("7", "COMPLETING")}))


def test_a_cancelled_run_is_not_started_again(run: RunDir) -> None:
    fsio.write_json(run.cancelled, {})
    with pytest.raises(NotOwner, match="cancelled"):
        claim(run, me(), FakeScheduler())


def _race(home: str, run_path: Path, job_id: str, start: object, out: object) -> None:
    alive = FakeScheduler(jobs={str(j): JobView(str(j), "RUNNING") for j in range(20)})
    start.wait()  # type: ignore[attr-defined]
    try:
        out.put(claim(RunDir(run_path), me(job_id), alive).attempt.n)  # type: ignore[attr-defined]
    except NotOwner:
        out.put(None)  # type: ignore[attr-defined]


def test_of_many_jobs_that_start_at_once_one_owns_the_run(run: RunDir) -> None:
    context = multiprocessing.get_context("fork")
    start, out = context.Event(), context.Queue()
    racers = [context.Process(target=_race, args=("", run.path, str(j), start, out)) for j in range(8)]
    for r in racers:
        r.start()
    start.set()
    answers = [out.get(timeout=60) for _ in racers]
    for r in racers:
        r.join()
    assert [a for a in answers if a is not None] == [1]
