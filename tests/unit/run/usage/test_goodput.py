"""The ledger of a run's time: what each part holds, and that they sum to the wall time whatever the files say."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from clustertrain.run import attempts, metrics
from clustertrain.run.usage import goodput
from clustertrain.run.usage.goodput import TIME_CATEGORIES, WHOLE_RUN, Goodput, TimeRange
from tests.unit.run.histories import History, Told


def book_of(history: History, now: float, *, finished: bool = True, of: TimeRange = WHOLE_RUN) -> Goodput:
    book = goodput.compute_goodput(history.run, attempts.load_attempts(history.run), now, finished, time_range=of)
    parts = [getattr(book, part) for part in TIME_CATEGORIES]
    assert all(math.isfinite(p) and p >= 0 for p in parts), book
    assert abs(math.fsum(parts) - book.wall_s) <= 1e-6
    assert 0 <= book.data_wait_s <= book.productive_s + book.repeated_s + 1e-6
    if book.ratio is not None:
        assert book.effective_ratio is not None and 0 <= book.ratio <= book.effective_ratio <= 1
    return book


def parts_of(book: Goodput) -> dict[str, float]:
    """Those that are not nothing."""
    return {part: pytest.approx(v) for part in TIME_CATEGORIES if (v := getattr(book, part)) > 1e-6}


def preempted_and_resumed(folder: Path) -> History:
    """100 s: queue to 10, first attempt to 50, queue to 60, second attempt from step 15 of 20 to the end."""
    history = History(folder)
    one = history.attempt(1, 10.0)
    one.t = 20.0
    for step in range(1, 21):
        one.step(step, 1.0, wait_s=0.25)
        if step == 10:
            one.lasting("checkpoint", "stall_s", 2.0, step=10, save_s=5.0)
    one.t += 1.0
    one.event("stop_agreed", step=20)
    one.batch(50.0, "ended", ending="preempted", last_step=20)
    one.batch(50.5, "requeued", method="requeue", job_id="7")
    one.write()
    two = history.attempt(2, 60.0)
    two.t = 65.0
    two.lasting("restored", "restore_s", 3.0, step=15)
    two.t = 70.0
    for step in range(16, 41):
        two.step(step, 1.0 if 16 < step < 21 else 0.5)
    two.lasting("checkpoint", "stall_s", 4.0, step=40, save_s=4.0)
    two.batch(100.0, "ended", ending="completed", last_step=40)
    two.write()
    return history


def test_each_part_holds_what_was_measured(tmp_path: Path) -> None:
    book = book_of(preempted_and_resumed(tmp_path), 500.0)
    assert book.wall_s == pytest.approx(100.0)
    assert parts_of(book) == {
        "queue_s": 10.0 + 10.0,
        "startup_s": 10.0 + 7.0,
        "restore_s": 3.0,
        "productive_s": 20.0 + 20 * 0.5,
        "repeated_s": 4.5,  # steps 16 to 20, by their own times and not as a share of all
        "checkpoint_stall_s": 2.0 + 4.0,  # the save after the last step as well
        "shutdown_s": 50.0 - 42.0 + 100.0 - 88.5,
    }
    assert book.data_wait_s == pytest.approx(20 * 0.25)
    assert book.ratio == pytest.approx(0.30)
    assert book.effective_ratio == pytest.approx(30.0 / 80.0)


def test_rows_of_many_scalars_are_counted_as_short_ones_are(tmp_path: Path) -> None:
    history = History(tmp_path)
    scalars = {f"gradient_norm_of_layer_{n}": n / 7 for n in range(110)}
    one = history.attempt(1, 0.0)
    for step in range(1, 101):
        one.step(step, 1.0 if step > 1 else 6.0, **scalars)
    one.batch(106.0, "ended", ending="node_failure")
    one.write()
    assert parts_of(book_of(history, 500.0)) == {"productive_s": 100.0, "startup_s": 5.0, "lost_s": 1.0}
    assert metrics.read_last_row(history.run.metrics_path(1))["step"] == 100  # type: ignore[index]


def test_a_killed_attempt_loses_what_followed_its_last_step(tmp_path: Path) -> None:
    history = History(tmp_path)
    one = history.attempt(1, 10.0)
    one.t = 20.0
    one.step(1, 10.0)
    one.step(2, 10.0)
    one.batch(90.0, "ended", ending="node_failure")
    one.write()
    assert parts_of(book_of(history, 90.0)) == {
        "queue_s": 10.0, "startup_s": 10.0, "productive_s": 20.0, "lost_s": 50.0,
    }  # fmt: skip


def test_killed_before_the_first_step_all_was_start_up(tmp_path: Path) -> None:
    history = History(tmp_path)
    one = history.attempt(1, 10.0)
    one.t = 15.0
    one.event("session_started", world_size=2)
    one.lasting("restored", "restore_s", 5.0, step=3)
    one.batch(50.0, "ended", ending="hang")
    one.write()
    assert parts_of(book_of(history, 60.0)) == {"queue_s": 10.0, "startup_s": 35.0, "restore_s": 5.0}


def test_the_first_step_counts_as_long_as_the_others_take_and_its_warming_up_is_start_up(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    one = history.attempt(1, 0.0)
    one.t = 10.0
    one.step(1, 62.0)  # compiles
    for step in range(2, 12):
        one.step(step, 2.0)
    one.batch(one.t, "ended", ending="completed")
    one.write()
    assert parts_of(book_of(history, 500.0)) == {"startup_s": 70.0, "productive_s": 22.0}


def test_an_evaluation_before_the_first_step_and_one_within_a_step_are_evaluation(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    one = history.attempt(1, 0.0)
    one.t = 4.0
    one.lasting("evaluation", "eval_s", 6.0, step=0)
    one.step(1, 2.0)
    one.lasting("evaluation", "eval_s", 3.0, step=1)  # the session takes it out of step 2
    one.step(2, 2.0)
    one.lasting("evaluation", "eval_s", 5.0, step=2)
    one.batch(25.0, "ended", ending="completed")
    one.write()
    assert parts_of(book_of(history, 99.0)) == {
        "startup_s": 4.0, "evaluation_s": 14.0, "productive_s": 4.0, "shutdown_s": 3.0,
    }  # fmt: skip


def test_what_nothing_claims_between_steps_is_said_apart(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    one = history.attempt(1, 0.0)
    for step in range(1, 5):
        one.step(step, 1.0)
        one.t += 0.5
    one.batch(5.5, "ended", ending="completed")
    one.write()
    assert parts_of(book_of(history, 99.0)) == {"productive_s": 4.0, "other_s": 1.5}


def test_a_script_that_trains_by_itself_has_no_steps_to_count(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    one = history.attempt(1, 0.0)
    one.batch(5.0, "ranks_started", world_size=1)
    one.batch(100.0, "ended", ending="completed")
    one.write()
    book = book_of(history, 100.0)
    assert parts_of(book) == {"startup_s": 5.0, "other_s": 95.0}
    assert (book.ratio, book.effective_ratio) == (None, None)  # what it did is not known
    history.run.spec.write_text("[job]\n")
    assert book_of(history, 100.0).ratio == 0.0  # the built-in trainer would have reported a step


def test_what_goes_on_now_is_not_yet_anything(tmp_path: Path) -> None:
    history = History(tmp_path)
    one = history.attempt(1, 10.0)
    one.t = 12.0
    one.step(1, 4.0)
    one.write()
    assert parts_of(book_of(history, 30.0, finished=False)) == {
        "queue_s": 10.0, "startup_s": 2.0, "productive_s": 4.0, "other_s": 14.0,
    }  # fmt: skip


@pytest.mark.parametrize(("finished", "queue_s"), [(False, 40.0), (True, 25.0)])
def test_a_run_that_never_started_has_waited_until_it_was_cancelled(
    tmp_path: Path, finished: bool, queue_s: float
) -> None:
    history = History(tmp_path, 10.0)
    history.of_run(35.0, "cancelled", user="me")
    assert parts_of(book_of(history, 50.0, finished=finished)) == {"queue_s": queue_s}


def test_a_requeued_job_that_is_held_waits_in_the_queue(tmp_path: Path) -> None:
    history = History(tmp_path)
    one = history.attempt(1, 0.0)
    one.step(1, 5.0)
    one.batch(5.0, "ended", ending="preempted")
    one.batch(5.5, "requeued", method="requeue", job_id="7")
    one.write()
    assert parts_of(book_of(history, 1005.0, finished=False)) == {"productive_s": 5.0, "queue_s": 1000.0}
    history.of_run(205.0, "cancelled", user="me")
    assert parts_of(book_of(history, 1005.0)) == {"productive_s": 5.0, "queue_s": 200.0}


def test_after_a_node_died_and_slurm_put_the_job_back_it_waits_since_the_last_sign_of_life(tmp_path: Path) -> None:
    history = History(tmp_path)
    one = history.attempt(1, 0.0)
    one.step(1, 5.0)
    one.write()
    book = goodput.compute_goodput(history.run, attempts.load_attempts(history.run), 105.0, False, is_queued=True)
    assert parts_of(book) == {"productive_s": 5.0, "queue_s": 100.0}


def test_the_days_before_an_ended_run_was_continued_by_hand_are_not_its_own(tmp_path: Path) -> None:
    history = History(tmp_path)
    one = history.attempt(1, 0.0)
    one.step(1, 5.0)
    one.batch(5.0, "ended", ending="user_error")
    one.batch(5.5, "stopped", reason="it would fail again")
    one.write()
    history.of_run(86_400.0, "continued", user="me")
    history.of_run(86_401.0, "continued", job_id="8")
    two = history.attempt(2, 86_410.0)
    two.t = 86_410.0
    two.step(2, 5.0)
    two.batch(86_415.0, "ended", ending="completed")
    two.write()
    assert parts_of(book_of(history, 90_000.0)) == {"productive_s": 10.0, "queue_s": 10.0}


def test_a_weekend_after_a_death_without_a_word_is_no_wait_in_the_queue(tmp_path: Path) -> None:
    history = History(tmp_path)
    one = history.attempt(1, 0.0)
    one.step(1, 5.0)
    one.write()
    history.of_run(200_000.0, "continued", user="me")
    two = history.attempt(2, 200_010.0)
    two.t = 200_010.0
    two.step(2, 5.0)
    two.batch(200_015.0, "ended", ending="completed")
    two.write()
    assert parts_of(book_of(history, 300_000.0)) == {"productive_s": 10.0, "queue_s": 10.0}


def test_an_attempt_without_an_end_ends_with_its_last_sign_of_life(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    one = history.attempt(1, 0.0)
    one.step(1, 5.0)
    one.write()
    two = history.attempt(2, 100.0)
    two.t = 100.0
    two.step(1, 5.0)
    two.step(2, 5.0)
    two.write()
    assert parts_of(book_of(history, 10_000.0)) == {"productive_s": 10.0, "repeated_s": 5.0, "queue_s": 95.0}


def test_an_attempt_that_another_hosts_clock_ends_late_ends_where_the_next_one_starts(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    one = history.attempt(1, 0.0)
    one.step(1, 5.0)
    one.batch(3600.0, "ended", ending="node_failure")  # by a host whose clock is ahead
    one.write()
    two = history.attempt(2, 20.0)
    two.t = 20.0
    two.step(2, 5.0)
    two.batch(25.0, "ended", ending="completed")
    two.write()
    assert parts_of(book_of(history, 90.0)) == {"productive_s": 10.0, "lost_s": 15.0}


def test_steps_that_three_attempts_did_count_once(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    for n, (first, last) in enumerate([(1, 30), (11, 20), (11, 40)], start=1):
        told = history.attempt(n, 100.0 * n)
        told.t = 100.0 * n
        for step in range(first, last + 1):
            told.step(step, n / 10)
            if step % 7 == 0:
                told.lasting("checkpoint", "stall_s", 0.01, step=step, save_s=0.02)
        told.batch(told.t, "ended", ending="preempted")
        told.write()
    book = book_of(history, 0.0)
    assert book.productive_s == pytest.approx(30 * 0.1 + 10 * 0.3)
    assert book.repeated_s == pytest.approx(10 * 0.2 + 20 * 0.3)


def test_rows_of_an_older_version_have_no_sums(tmp_path: Path) -> None:
    history = preempted_and_resumed(tmp_path)
    new = book_of(history, 100.0)
    for n in (1, 2):
        path = history.run.metrics_path(n)
        path.write_text(path.read_text().replace("sum_step_s", "my_step_s"))
    assert book_of(history, 100.0).repeated_s == pytest.approx(new.repeated_s)
    assert book_of(history, 100.0).productive_s == pytest.approx(new.productive_s)


def test_a_clock_that_is_set_back_shrinks_what_was_measured_to_what_there_is_room_for(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    one = history.attempt(1, 0.0)
    one.t = 10.0
    for step in range(1, 9):
        one.step(step, 10.0, wait_s=5.0)
    one.t -= 60.0
    one.step(9, 10.0)
    one.lasting("checkpoint", "stall_s", 500.0, step=9, save_s=500.0)
    one.batch(45.0, "ended", ending="completed")
    one.write()
    book = book_of(history, 99.0)
    assert book.wall_s == pytest.approx(45.0)
    assert book.productive_s == pytest.approx(30.0)
    assert book.data_wait_s == pytest.approx(40.0 * 30.0 / 90.0)


def test_a_submission_after_the_end_by_its_hosts_clock_does_not_hide_the_run(tmp_path: Path) -> None:
    history = History(tmp_path, 1000.0)
    one = history.attempt(1, 10.0)
    one.t = 10.0
    one.step(1, 5.0)
    one.batch(15.0, "ended", ending="completed")
    one.write()
    assert parts_of(book_of(history, 15.0)) == {"productive_s": 5.0}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_clocks_say_the_parts_sum_and_none_is_negative(tmp_path: Path, seed: int) -> None:
    at = random.Random(seed)

    def moment() -> float:
        return at.choice([at.uniform(-100, 1000), at.uniform(0, 100), at.uniform(0, 1) * 1e9])

    history = History(tmp_path, at.choice([None, moment()]))
    for n in range(1, at.randrange(1, 6)):
        told = history.attempt(n, at.choice([None, moment(), 100.0 * n]))
        told.t = at.choice([moment(), 100.0 * n])
        _wild(told, at)
        if at.random() < 0.6:
            told.batch(moment(), "ended", ending=at.choice(["completed", "preempted", "hang", "cancelled"]))
        if at.random() < 0.3:
            told.batch(moment(), "stopped", reason="no progress")
        told.write()
    for name in ("continued", "cancelled"):
        if at.random() < 0.4:
            history.of_run(moment(), name)
    for finished in (True, False):
        book_of(history, moment(), finished=finished)


def _wild(told: Told, at: random.Random) -> None:
    step = at.randrange(20)
    for _ in range(at.randrange(30)):
        what = at.randrange(8)
        if what == 0:
            told.lasting("checkpoint", "stall_s", at.uniform(0, 400), step=step, save_s=at.uniform(0, 20))
        elif what == 1:
            told.lasting("evaluation", "eval_s", at.uniform(0, 60), step=step)
        elif what == 2:
            told.lasting("restored", "restore_s", at.uniform(0, 60), step=step)
        elif what == 3:
            told.t += at.uniform(-200, 200)
        elif what == 4:
            told.event(at.choice(["stop_agreed", "session_started", "ranks_started"]))
        else:
            step += 1
            told.step(step, at.uniform(0, 5), wait_s=at.uniform(0, 9))


def test_the_ledgers_of_the_attempts_add_up_to_that_of_the_run(tmp_path: Path) -> None:
    history = preempted_and_resumed(tmp_path)
    whole = book_of(history, 500.0)
    one, two = (book_of(history, 500.0, of=TimeRange(attempt=n)) for n in (1, 2))
    assert (one.wall_s, two.wall_s) == (pytest.approx(50.0), pytest.approx(50.0))  # each with the wait before it
    assert one.repeated_s == 0 and two.repeated_s == pytest.approx(whole.repeated_s)
    for part in TIME_CATEGORIES:
        assert getattr(one, part) + getattr(two, part) == pytest.approx(getattr(whole, part)), part


def test_the_ledger_of_the_last_seconds(tmp_path: Path) -> None:
    history = preempted_and_resumed(tmp_path)
    whole = book_of(history, 500.0)
    assert book_of(history, 500.0, of=TimeRange(since=-1.0)) == whole
    before = whole
    for since in (5.0, 15.0, 25.5, 31.0, 49.0, 55.0, 64.0, 67.5, 72.3, 90.0, 99.9):
        book = book_of(history, 500.0, of=TimeRange(since=since))
        assert book.wall_s == pytest.approx(100.0 - since)
        for part in TIME_CATEGORIES:
            assert getattr(book, part) <= getattr(before, part) + 1e-6, (since, part)
        before = book
    assert book_of(history, 500.0, of=TimeRange(since=200.0)) == Goodput()


def test_what_the_last_seconds_hold(tmp_path: Path) -> None:
    """From the middle of step 18 on, which ends at 72.5; three are repeated, then come 20 of half a second."""
    book = book_of(preempted_and_resumed(tmp_path), 500.0, of=TimeRange(since=72.0))
    assert parts_of(book)["repeated_s"] == pytest.approx(2.5)
    assert parts_of(book)["productive_s"] == pytest.approx(10.0)
    assert parts_of(book)["checkpoint_stall_s"] == pytest.approx(4.0)
    assert set(parts_of(book)) == {"repeated_s", "productive_s", "checkpoint_stall_s", "shutdown_s"}
