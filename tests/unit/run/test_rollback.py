"""A run that went back within an attempt: its rows, its attempts and its ledger, on reading."""

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
from tests.unit.run.histories import History, Told


def gone_back(folder: Path, *, killed: bool = False) -> History:
    """From 0 to 60 s: steps 1 to 20 of 1 s, back to 12 because of 20, steps 13 to 24 of 0.5 s. ``killed``: at once
    after it went back; a second attempt does the same 12 steps then."""
    history = History(folder)
    one = history.attempt(1, 0.0)
    one.t = 5.0
    for step in range(1, 21):
        one.step(step, 1.0, loss=float(step), wait_s=0.125)
        if step in (6, 12, 18):
            one.lasting("checkpoint", "stall_s", 1.0, step=step, save_s=1.0)
    one.back(20, 12, 4.0)
    last, at = one, 60.0
    if killed:
        one.batch(40.0, "ended", ending="unknown")
        one.write()
        last, at = history.attempt(2, 50.0), 90.0
        last.t = 52.0
        last.lasting("restored", "restore_s", 2.0, step=12)
    again(last)
    last.batch(at, "ended", ending="completed", last_step=24)
    last.write()
    return history


def again(told: Told) -> None:
    for step in range(13, 25):
        told.step(step, 0.5, loss=100.0 + step)
    told.lasting("checkpoint", "stall_s", 1.0, step=24, save_s=1.0)


def book_of(history: History) -> Goodput:
    book = goodput.compute_goodput(history.run, attempts.load_attempts(history.run), 500.0, is_finished=True)
    parts = [getattr(book, part) for part in TIME_CATEGORIES]
    assert math.fsum(parts) == book.wall_s and min(parts) >= 0
    return book


@pytest.mark.parametrize("killed", [False, True])
def test_a_step_done_twice_counts_once(tmp_path: Path, killed: bool) -> None:
    history = gone_back(tmp_path / "run", killed=killed)
    found = metrics.load_rows(history.run)
    assert [r["step"] for r in found] == list(range(1, 25))
    assert [r["loss"] for r in found[10:14]] == [11.0, 12.0, 113.0, 114.0]
    newest = metrics.find_latest_row(history.run)
    assert newest is not None and newest["step"] == 24
    counted = _steps_by_attempt(history.run, attempts.load_attempts(history.run), 1, None)
    assert sum(len(p.column("step")) for p in counted) == 24


def test_the_ledger_knows_what_was_thrown_away_and_the_restore(tmp_path: Path) -> None:
    book = book_of(gone_back(tmp_path / "run"))
    assert book.wall_s == pytest.approx(60.0)
    assert book.repeated_s == pytest.approx(8 * 0.5)  # 13 to 20, when they were done again
    assert book.productive_s == pytest.approx(20.0 + 4 * 0.5)
    assert (book.restore_s, book.checkpoint_stall_s) == (pytest.approx(4.0), pytest.approx(4.0))
    assert book.data_wait_s == pytest.approx(2.5)


def test_killed_while_it_goes_back_nothing_is_counted_twice(tmp_path: Path) -> None:
    book = book_of(gone_back(tmp_path / "run", killed=True))
    assert book.repeated_s == pytest.approx(8 * 0.5)
    assert book.productive_s == pytest.approx(20.0 + 4 * 0.5)
    assert book.restore_s == pytest.approx(4.0 + 2.0)


def test_what_was_committed_and_taken_back_is_no_progress(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    one = history.attempt(1, 0.0)
    one.t = 1.0
    one.lasting("restored", "restore_s", 1.0, step=6)
    for step in range(7, 20):
        one.step(step, 1.0)
        if step == 12:
            one.lasting("checkpoint", "stall_s", 1.0, step=12, save_s=1.0)
    one.back(19, 6, 1.0)
    one.write()
    (attempt,) = attempts.load_attempts(history.run)
    assert (attempt.committed_step, attempt.made_progress, attempt.roll_backs) == (None, False, 1)
    assert attempt.last_step == 19


def killed_after_a_commit(folder: Path) -> History:
    """A checkpoint every ten steps; the third is committed, and neither its event nor the last rows are written."""
    history = History(folder)
    one = history.attempt(1, 0.0)
    for step in range(1, 28):
        one.step(step, 1.0)
        if step in (10, 20):
            one.lasting("checkpoint", "stall_s", 1.0, step=step, save_s=1.0)
    one.write()
    saved = history.run.checkpoints / "step-00000030"
    saved.mkdir(parents=True)
    (saved / "COMMITTED").write_bytes(b"{}")
    return history


def test_a_commit_that_the_kill_left_no_time_to_tell_of_counts(tmp_path: Path) -> None:
    history = killed_after_a_commit(tmp_path / "run")
    (attempt,) = attempts.load_attempts(history.run)
    assert (attempt.committed_step, attempt.last_step, attempt.made_progress) == (30, 30, True)


def test_it_is_the_earlier_attempts_even_when_retention_has_taken_the_checkpoint(tmp_path: Path) -> None:
    history = killed_after_a_commit(tmp_path / "run")
    two = history.attempt(2, 40.0)
    two.event("restored", step=30)
    two.write()
    history.attempt(3, 41.0).write()  # killed before its first step
    found = attempts.load_attempts(history.run)
    assert [(a.committed_step, a.made_progress) for a in found] == [(30, True), (None, False), (None, False)]

    four = history.attempt(4, 50.0)
    four.event("restored", step=30)
    for step in range(31, 42):
        four.step(step, 1.0)
    four.lasting("checkpoint", "stall_s", 1.0, step=40, save_s=1.0)
    four.write()
    shutil.rmtree(history.run.checkpoints)
    assert [a.committed_step for a in attempts.load_attempts(history.run)] == [30, None, None, 40]


def test_what_lies_there_from_before_the_attempt_is_not_its_own(tmp_path: Path) -> None:
    history = killed_after_a_commit(tmp_path / "run")
    two = history.attempt(2, 40.0)
    two.event("restored", step=30)
    two.step(31, 1.0)
    two.write()
    assert [(a.committed_step, a.made_progress) for a in attempts.load_attempts(history.run)] == [
        (30, True),
        (None, False),
    ]


def test_a_scripts_second_loop_takes_up_what_the_first_one_of_the_same_attempt_has_left(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    one = history.attempt(1, 0.0)
    for step in range(1, 6):
        one.step(step, 1.0)
    one.write()
    two = history.attempt(2, 40.0)
    two.t = 40.0
    for step in range(1, 21):
        two.step(step, 1.0)
    two.lasting("checkpoint", "stall_s", 1.0, step=20, save_s=1.0)
    two.event("restored", step=20)
    two.step(21, 1.0)
    two.write()
    first, second = attempts.load_attempts(history.run)
    assert (first.committed_step, first.last_step, first.made_progress) == (None, 5, False)
    assert (second.committed_step, second.restored_step, second.made_progress) == (20, None, True)


def test_what_an_earlier_attempt_has_told_of_is_no_later_ones_that_did_not_see_it(tmp_path: Path) -> None:
    """As of a folder that is listed late. Else each of them would refill the budget of attempts without progress."""
    history = killed_after_a_commit(tmp_path / "run")
    (history.run.checkpoints / "step-00000030").rename(history.run.checkpoints / "step-00000020")
    for n in (2, 3):
        later = history.attempt(n, 40.0 * n)
        later.t = 40.0 * n
        later.event("restored", step=10)
        for step in range(11, 14):
            later.step(step, 1.0)
        later.write()
    found = attempts.load_attempts(history.run)
    assert [(a.committed_step, a.made_progress) for a in found] == [(20, True), (None, False), (None, False)]


@pytest.mark.parametrize("why", ["it went back", "damaged"])
def test_what_was_told_of_and_does_not_count_any_more_takes_no_later_commit_away(tmp_path: Path, why: str) -> None:
    """Commits that are not told of, below a step that the run has gone back behind."""
    history = History(tmp_path / "run")

    def attempt(n: int, restored: int | None, to: int, *, skipped: Sequence[int] = ()) -> Told:
        told = history.attempt(n, 100.0 * n)
        told.t = 100.0 * n
        if restored is not None:
            told.event(
                "restored", step=restored, skipped=[{"step": s, "reason": "a checksum differs"} for s in skipped]
            )
        for step in range((restored or 0) + 1, to + 1):
            told.step(step, 1.0)
        return told

    one = attempt(1, None, 16)
    for step in (10, 15):
        one.event("checkpoint", step=step)
    one.write()
    if why == "damaged":
        attempt(2, 10, 13, skipped=[15]).write()
    else:
        two = attempt(2, 15, 19)
        two.back(19, 10, 1.0)
        two.write()
    attempt(3, 10, 13).write()  # commits 12
    attempt(4, 12, 14).write()  # commits 14
    saved = history.run.checkpoints / "step-00000014"
    saved.mkdir(parents=True)
    (saved / "COMMITTED").write_bytes(b"{}")

    found = [(a.n, a.committed_step) for a in attempts.load_attempts(history.run)]
    assert found[0] == (1, 15) and found[2:] == [(3, 12), (4, 14)]


def test_files_that_are_not_there_yet_and_the_speed_over_all_of_them(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    assert history.run.metrics_files(1) == [history.run.metrics_path(1)]
    done = gone_back(tmp_path / "other").run
    assert [p.name for p in done.metrics_files(1)] == ["attempt-1.jsonl", "attempt-1-1.jsonl"]
    assert measure_speed(done, done.attempts()).steps == 32 - 2 * 5
