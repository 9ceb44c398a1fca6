"""A run that rolled back within an attempt: its rows, its attempts and its ledger."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from clustertrain.run import attempts, metrics
from clustertrain.run.usage import goodput
from clustertrain.run.usage.goodput import TIME_CATEGORIES, Goodput
from clustertrain.run.usage.measured_speed import measure_speed
from clustertrain.telemetry.analysis.efficiency import _steps_by_attempt
from tests.unit.run.histories import AttemptWriter, History


def make_rolled_back_run(folder: Path, *, killed: bool = False) -> History:
    """Write a run of 60 s: steps 1 to 20 take 1 s each, step 20 causes a rollback to 12, steps 13 to 24 take 0.5 s.

    With ``killed``, the attempt is killed right after the rollback, and a second attempt runs the 12 steps.
    """
    history = History(folder)
    first = history.attempt(1, 0.0)
    first.t = 5.0
    for step in range(1, 21):
        first.step(step, 1.0, loss=float(step), wait_s=0.125)
        if step in (6, 12, 18):
            first.timed_event("checkpoint", "stall_s", 1.0, step=step, save_s=1.0)
    first.roll_back(20, 12, 4.0)
    last, end = first, 60.0
    if killed:
        first.batch_event(40.0, "ended", ending="unknown")
        first.write()
        last, end = history.attempt(2, 50.0), 90.0
        last.t = 52.0
        last.timed_event("restored", "restore_s", 2.0, step=12)
    write_steps_after_rollback(last)
    last.batch_event(end, "ended", ending="completed", last_step=24)
    last.write()
    return history


def write_steps_after_rollback(attempt: AttemptWriter) -> None:
    for step in range(13, 25):
        attempt.step(step, 0.5, loss=100.0 + step)
    attempt.timed_event("checkpoint", "stall_s", 1.0, step=24, save_s=1.0)


def compute_ledger(history: History) -> Goodput:
    ledger = goodput.compute_goodput(history.run, attempts.load_attempts(history.run), 500.0, is_finished=True)
    parts = [getattr(ledger, part) for part in TIME_CATEGORIES]
    assert math.fsum(parts) == ledger.wall_s and min(parts) >= 0
    return ledger


@pytest.mark.parametrize("killed", [False, True])
def test_repeated_step_counts_once(tmp_path: Path, killed: bool) -> None:
    history = make_rolled_back_run(tmp_path / "run", killed=killed)
    rows = metrics.load_rows(history.run)
    assert [r["step"] for r in rows] == list(range(1, 25))
    assert [r["loss"] for r in rows[10:14]] == [11.0, 12.0, 113.0, 114.0]
    newest = metrics.find_latest_row(history.run)
    assert newest is not None and newest["step"] == 24
    counted = _steps_by_attempt(history.run, attempts.load_attempts(history.run), 1, None)
    assert sum(len(p.column("step")) for p in counted) == 24


def test_ledger_separates_repeated_steps_and_the_restore(tmp_path: Path) -> None:
    ledger = compute_ledger(make_rolled_back_run(tmp_path / "run"))
    assert ledger.wall_s == pytest.approx(60.0)
    assert ledger.repeated_s == pytest.approx(8 * 0.5)  # steps 13 to 20, the second time
    assert ledger.productive_s == pytest.approx(20.0 + 4 * 0.5)
    assert (ledger.restore_s, ledger.checkpoint_stall_s) == (pytest.approx(4.0), pytest.approx(4.0))
    assert ledger.data_wait_s == pytest.approx(2.5)


def test_kill_during_a_rollback_counts_nothing_twice(tmp_path: Path) -> None:
    ledger = compute_ledger(make_rolled_back_run(tmp_path / "run", killed=True))
    assert ledger.repeated_s == pytest.approx(8 * 0.5)
    assert ledger.productive_s == pytest.approx(20.0 + 4 * 0.5)
    assert ledger.restore_s == pytest.approx(4.0 + 2.0)


def test_commit_that_was_rolled_back_is_not_progress(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    first = history.attempt(1, 0.0)
    first.t = 1.0
    first.timed_event("restored", "restore_s", 1.0, step=6)
    for step in range(7, 20):
        first.step(step, 1.0)
        if step == 12:
            first.timed_event("checkpoint", "stall_s", 1.0, step=12, save_s=1.0)
    first.roll_back(19, 6, 1.0)
    first.write()
    (attempt,) = attempts.load_attempts(history.run)
    assert (attempt.committed_step, attempt.made_progress, attempt.roll_backs) == (None, False, 1)
    assert attempt.last_step == 19


def make_run_killed_after_commit(folder: Path) -> History:
    """Write a run that saves every 10 steps. The third is committed, but its event and later rows are not written."""
    history = History(folder)
    first = history.attempt(1, 0.0)
    for step in range(1, 28):
        first.step(step, 1.0)
        if step in (10, 20):
            first.timed_event("checkpoint", "stall_s", 1.0, step=step, save_s=1.0)
    first.write()
    checkpoint = history.run.checkpoints / "step-00000030"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").write_bytes(b"{}")
    return history


def test_commit_without_an_event_counts(tmp_path: Path) -> None:
    history = make_run_killed_after_commit(tmp_path / "run")
    (attempt,) = attempts.load_attempts(history.run)
    assert (attempt.committed_step, attempt.last_step, attempt.made_progress) == (30, 30, True)


def test_commit_belongs_to_the_earlier_attempt_after_retention(tmp_path: Path) -> None:
    history = make_run_killed_after_commit(tmp_path / "run")
    second = history.attempt(2, 40.0)
    second.event("restored", step=30)
    second.write()
    history.attempt(3, 41.0).write()  # killed before its first step
    loaded = attempts.load_attempts(history.run)
    assert [(a.committed_step, a.made_progress) for a in loaded] == [(30, True), (None, False), (None, False)]

    fourth = history.attempt(4, 50.0)
    fourth.event("restored", step=30)
    for step in range(31, 42):
        fourth.step(step, 1.0)
    fourth.timed_event("checkpoint", "stall_s", 1.0, step=40, save_s=1.0)
    fourth.write()
    shutil.rmtree(history.run.checkpoints)
    assert [a.committed_step for a in attempts.load_attempts(history.run)] == [30, None, None, 40]


def test_checkpoint_from_before_the_attempt_is_not_its_commit(tmp_path: Path) -> None:
    history = make_run_killed_after_commit(tmp_path / "run")
    second = history.attempt(2, 40.0)
    second.event("restored", step=30)
    second.step(31, 1.0)
    second.write()
    assert [(a.committed_step, a.made_progress) for a in attempts.load_attempts(history.run)] == [
        (30, True),
        (None, False),
    ]


def test_restore_of_the_attempts_own_commit_is_not_a_restored_step(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    first = history.attempt(1, 0.0)
    for step in range(1, 6):
        first.step(step, 1.0)
    first.write()
    second = history.attempt(2, 40.0)
    second.t = 40.0
    for step in range(1, 21):
        second.step(step, 1.0)
    second.timed_event("checkpoint", "stall_s", 1.0, step=20, save_s=1.0)
    second.event("restored", step=20)
    second.step(21, 1.0)
    second.write()
    one, two = attempts.load_attempts(history.run)
    assert (one.committed_step, one.last_step, one.made_progress) == (None, 5, False)
    assert (two.committed_step, two.restored_step, two.made_progress) == (20, None, True)


def test_later_attempts_that_missed_a_commit_do_not_get_it(tmp_path: Path) -> None:
    """Example: a stale folder listing. Otherwise each of them would refill the budget of attempts without progress."""
    history = make_run_killed_after_commit(tmp_path / "run")
    (history.run.checkpoints / "step-00000030").rename(history.run.checkpoints / "step-00000020")
    for n in (2, 3):
        later = history.attempt(n, 40.0 * n)
        later.t = 40.0 * n
        later.event("restored", step=10)
        for step in range(11, 14):
            later.step(step, 1.0)
        later.write()
    loaded = attempts.load_attempts(history.run)
    assert [(a.committed_step, a.made_progress) for a in loaded] == [(20, True), (None, False), (None, False)]


@pytest.mark.parametrize("cause", ["rolled back", "damaged"])
def test_event_of_a_void_checkpoint_hides_no_later_commit(tmp_path: Path, cause: str) -> None:
    """The later commits have no event, and their steps lie below a checkpoint event that no longer counts."""
    history = History(tmp_path / "run")

    def make_attempt(n: int, restored: int | None, to: int, *, skipped: Sequence[int] = ()) -> AttemptWriter:
        attempt = history.attempt(n, 100.0 * n)
        attempt.t = 100.0 * n
        if restored is not None:
            attempt.event(
                "restored", step=restored, skipped=[{"step": s, "reason": "a checksum differs"} for s in skipped]
            )
        for step in range((restored or 0) + 1, to + 1):
            attempt.step(step, 1.0)
        return attempt

    first = make_attempt(1, None, 16)
    for step in (10, 15):
        first.event("checkpoint", step=step)
    first.write()
    if cause == "damaged":
        make_attempt(2, 10, 13, skipped=[15]).write()
    else:
        second = make_attempt(2, 15, 19)
        second.roll_back(19, 10, 1.0)
        second.write()
    make_attempt(3, 10, 13).write()  # commits 12
    make_attempt(4, 12, 14).write()  # commits 14
    checkpoint = history.run.checkpoints / "step-00000014"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").write_bytes(b"{}")

    commits = [(a.n, a.committed_step) for a in attempts.load_attempts(history.run)]
    assert commits[0] == (1, 15) and commits[2:] == [(3, 12), (4, 14)]


def test_rows_and_speed_cover_the_files_of_all_rollbacks(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    assert history.run.metrics_files(1) == [history.run.metrics_path(1)]
    done = make_rolled_back_run(tmp_path / "other").run
    assert [p.name for p in done.metrics_files(1)] == ["attempt-1.jsonl", "attempt-1-1.jsonl"]
    assert measure_speed(done, done.attempts()).steps == 32 - 2 * 5


def test_status_notes_a_record_of_rollbacks_that_cannot_be_read(tmp_path: Path) -> None:
    run = make_rolled_back_run(tmp_path / "run").run
    history = attempts.load_attempts(run)
    assert attempts.list_read_errors(run, history) == []
    run.rollback_record.parent.mkdir()
    run.rollback_record.write_text("[]")
    assert attempts.list_read_errors(run, history) == []
    run.rollback_record.write_text('[{"invalidated": [[3, ')
    (note,) = attempts.list_read_errors(run, history)
    assert note.startswith("checkpoints/rolled-back.json: ") and run.committed_steps() == []
