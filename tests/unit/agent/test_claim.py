"""The claim of an attempt: it closes the attempts that died, and two jobs never own the run at once."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clustertrain import fsio
from clustertrain.agent import claim as module
from clustertrain.agent.claim import JobIdentity, claim_attempt
from clustertrain.errors import NotOwner
from clustertrain.run import attempts, run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.backend import JobStart, JobView, Submission


@dataclass
class FakeScheduler:
    """A scheduler that answers with the test's jobs and starts."""

    name: str = "slurm"
    jobs: dict[str, JobView] = field(default_factory=dict)
    past: dict[str, list[JobStart]] = field(default_factory=dict)

    def query_jobs(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        return {j: self.jobs[j] for j in job_ids if j in self.jobs}

    def list_starts(self, job_id: str) -> list[JobStart]:
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

    def current_job_id(self, environ: Mapping[str, str]) -> str | None:
        return None

    def current_nodes(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        return ()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    run = run_dir.create_run("claimed")
    run.spec.write_text("version = 1\n")
    return run


def identity(job_id: str = "7", restart: int = 0) -> JobIdentity:
    return JobIdentity(job_id, restart, ("n1", "n2"), None)


def test_attempts_are_numbered_from_one(run: RunDir) -> None:
    held = claim_attempt(run, identity(), FakeScheduler())
    assert held.attempt.n == 1
    assert fsio.read_json(held.attempt.record)["job_id"] == "7"


@pytest.mark.parametrize(
    ("state", "ending"),
    [
        ("NODE_FAIL", "node_failure"),
        ("PREEMPTED", "preempted"),
        ("TIMEOUT", "time_limit"),
        ("REQUEUED", "preempted"),
        ("FAILED", "unknown"),
    ],
)
def test_restart_closes_the_attempt_that_died(run: RunDir, state: str, ending: str) -> None:
    claim_attempt(run, identity(), FakeScheduler())
    started = attempts.load_attempts(run)[0].start
    rows = [
        JobStart("7", state, start=started, end=started),
        JobStart("7", "RUNNING", start=started + 100 if started else None),
    ]
    held = claim_attempt(run, identity(restart=1), FakeScheduler(past={"7": rows}))
    assert held.attempt.n == 2
    closed = attempts.load_attempts(run)[0]
    assert (closed.ending, closed.requeued) == (ending, "slurm")


def test_the_same_start_cannot_claim_twice(run: RunDir) -> None:
    claim_attempt(run, identity(), FakeScheduler())
    with pytest.raises(NotOwner):
        claim_attempt(run, identity(), FakeScheduler())


def test_second_job_is_refused_while_the_first_runs(run: RunDir) -> None:
    claim_attempt(run, identity("7"), FakeScheduler())
    with pytest.raises(NotOwner, match="held by job 7"):
        claim_attempt(run, identity("8"), FakeScheduler(jobs={"7": JobView("7", "RUNNING")}))


@pytest.mark.parametrize("state", [None, "PENDING", "NODE_FAIL", "CANCELLED"])
def test_second_job_takes_over_after_the_first_has_ended(run: RunDir, state: str | None) -> None:
    claim_attempt(run, identity("7"), FakeScheduler())
    jobs = {"7": JobView("7", state)} if state else {}
    assert claim_attempt(run, identity("8"), FakeScheduler(jobs=jobs)).attempt.n == 2


def test_job_stuck_in_completing_keeps_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPLETING_S", 0.0)
    claim_attempt(run, identity("7"), FakeScheduler())
    with pytest.raises(NotOwner, match="does not end"):
        claim_attempt(run, identity("8"), FakeScheduler(jobs={"7": JobView("7", "COMPLETING")}))


def test_cancelled_run_cannot_be_claimed(run: RunDir) -> None:
    fsio.write_json(run.cancel_marker, {})
    with pytest.raises(NotOwner, match="cancelled"):
        claim_attempt(run, identity(), FakeScheduler())


def _race(run_path: Path, job_id: str, start: object, out: object) -> None:
    alive = FakeScheduler(jobs={str(j): JobView(str(j), "RUNNING") for j in range(20)})
    start.wait()  # type: ignore[attr-defined]
    try:
        out.put(claim_attempt(RunDir(run_path), identity(job_id), alive).attempt.n)  # type: ignore[attr-defined]
    except NotOwner:
        out.put(None)  # type: ignore[attr-defined]


@pytest.mark.long
def test_one_of_many_simultaneous_jobs_owns_the_run(run: RunDir) -> None:
    context = multiprocessing.get_context("fork")
    start, out = context.Event(), context.Queue()
    racers = [context.Process(target=_race, args=(run.path, str(j), start, out)) for j in range(1, 9)]
    for r in racers:
        r.start()
    start.set()
    answers = [out.get(timeout=60) for _ in racers]
    for r in racers:
        r.join()
    assert [a for a in answers if a is not None] == [1]


RUNNING = {str(job): JobView(str(job), "RUNNING") for job in (8, 9)}


def _claims(run: RunDir, job_id: str, scheduler: FakeScheduler, owners: list[str], refused: list[str]) -> None:
    try:
        claim_attempt(run, identity(job_id), scheduler)
        owners.append(job_id)
    except NotOwner as e:
        refused.append(str(e))


class SchedulerDuringOtherClaim(FakeScheduler):
    """The first query about the dead job 7 returns only after job 8 has made its whole claim."""

    def __init__(self, other_claim: Callable[[], None]) -> None:
        super().__init__(jobs=RUNNING)
        self.other_claim: Callable[[], None] | None = other_claim

    def _run_other_claim(self) -> None:
        if self.other_claim is not None:
            other = threading.Thread(target=self.other_claim)
            self.other_claim = None
            other.start()
            other.join()

    def query_jobs(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        asked = list(job_ids)
        if "7" in asked:
            self._run_other_claim()
        return super().query_jobs(asked)

    def list_starts(self, job_id: str) -> list[JobStart]:
        self._run_other_claim()
        return super().list_starts(job_id)


@pytest.mark.parametrize("query", ["jobs", "starts"])
def test_attempt_claimed_during_another_claim_is_noticed(run: RunDir, query: str) -> None:
    claim_attempt(run, identity("7"), FakeScheduler())
    owners: list[str] = []
    refused: list[str] = []
    other = FakeScheduler(jobs=RUNNING)
    scheduler = SchedulerDuringOtherClaim(lambda: _claims(run, "8", other, owners, refused))
    if query == "starts":
        scheduler.query_jobs = other.query_jobs  # type: ignore[method-assign]
    _claims(run, "9", scheduler, owners, refused)
    # Either job may come first, but only one owns the run.
    assert len(owners) == 1 and len(refused) == 1 and "held by job" in refused[0]
    assert len(run.attempts()) == 2


def test_attempt_missing_from_a_stale_folder_listing_is_noticed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client may list a folder from its cache, but the server does the rename."""
    claim_attempt(run, identity("7"), FakeScheduler())
    claim_attempt(run, identity("8"), FakeScheduler())
    monkeypatch.setattr(RunDir, "attempts", lambda self: [self.attempt(1)])
    with pytest.raises(NotOwner, match=r"attempt 2 .* is held by job 8"):
        claim_attempt(run, identity("9"), FakeScheduler(jobs=RUNNING))


@pytest.mark.parametrize("ending", ["cancelled", "completed"])
def test_run_that_ends_during_a_claim_is_not_claimed(run: RunDir, ending: str) -> None:
    claim_attempt(run, identity("7"), FakeScheduler())

    def other_claim() -> None:
        held = claim_attempt(run, identity("8"), FakeScheduler())
        if ending == "cancelled":
            fsio.write_json(run.cancel_marker, {})
        log = EventLog(held.attempt.events_path("batch"))
        log.write("ended", ending=ending)
        log.close()

    with pytest.raises(NotOwner, match=r"was cancelled|is complete"):
        claim_attempt(run, identity("9"), SchedulerDuringOtherClaim(other_claim))


def test_rename_that_an_nfs_client_repeats_succeeds_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer was lost, so the client sends the request again, which then finds nothing to rename."""
    rename = Path.rename

    def twice(self: Path, target: Path) -> Path:
        rename(self, target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", twice)
    temporary, final = run.attempts_folder / ".claim", run.attempts_folder / "1"
    temporary.mkdir(parents=True)
    (temporary / "attempt.json").write_text("{}")
    assert fsio.rename_folder(temporary, final)
    with pytest.raises(FileNotFoundError):
        fsio.rename_folder(run.attempts_folder / ".never", run.attempts_folder / "2")


def test_failed_claim_leaves_nothing(run: RunDir) -> None:
    claim_attempt(run, identity("7"), FakeScheduler())
    with pytest.raises(NotOwner):
        claim_attempt(run, identity("8"), FakeScheduler(jobs={"7": JobView("7", "RUNNING")}))
    assert [p.name for p in run.attempts_folder.iterdir()] == ["1"]
    assert attempts.load_attempts(run)[0].ending is None  # a job that does not own the run closes nothing


class FolderScheduler(FakeScheduler):
    """A scheduler whose jobs run while a file with their name exists."""

    def __init__(self, alive: Path) -> None:
        super().__init__()
        self.alive = alive

    def query_jobs(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        return {j: JobView(j, "RUNNING") for j in job_ids if (self.alive / j).exists()}


def _claim_repeatedly(run: RunDir, alive: Path, who: int, rounds: int, out: object) -> None:
    """Start jobs one after another until the run has enough attempts. Each dies silently as soon as it owns the run."""
    scheduler, owned = FolderScheduler(alive), 0
    training = alive.parent / "training"
    try:
        number = 0
        while len(run.attempts()) < rounds:
            number += 1
            job = alive / f"{who}00{number}"
            job.touch()
            try:
                claim_attempt(run, identity(job.name), scheduler)
                os.close(os.open(training, os.O_CREAT | os.O_EXCL))  # fails if another job trains
                owned += 1
                training.unlink()
            except NotOwner:
                pass
            job.unlink()
        out.put((owned, None))  # type: ignore[attr-defined]
    except BaseException as e:
        out.put((owned, repr(e)))  # type: ignore[attr-defined]
        raise


@pytest.mark.long
def test_many_rounds_of_claims_have_one_owner_each(run: RunDir, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    alive.mkdir()
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    claimers = [context.Process(target=_claim_repeatedly, args=(run, alive, w, 20, out)) for w in range(1, 5)]
    for c in claimers:
        c.start()
    answers = [out.get(timeout=120) for _ in claimers]
    for c in claimers:
        c.join()
    assert [trouble for _, trouble in answers if trouble] == []
    numbers = [a.n for a in run.attempts()]
    assert sum(owned for owned, _ in answers) == len(numbers) and numbers == list(range(1, len(numbers) + 1))
