"""The ledger of a run's time: what each part holds, and that the parts sum to the wall time whatever the files hold."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from clustertrain.run import attempts, metrics
from clustertrain.run.usage import goodput
from clustertrain.run.usage.goodput import TIME_CATEGORIES, WHOLE_RUN, Goodput, TimeRange
from tests.unit.run.histories import AttemptWriter, History


def compute_ledger(
    history: History, now: float, *, finished: bool = True, time_range: TimeRange = WHOLE_RUN
) -> Goodput:
    ledger = goodput.compute_goodput(
        history.run, attempts.load_attempts(history.run), now, finished, time_range=time_range
    )
    parts = [getattr(ledger, part) for part in TIME_CATEGORIES]
    assert all(math.isfinite(p) and p >= 0 for p in parts), ledger
    assert abs(math.fsum(parts) - ledger.wall_s) <= 1e-6
    assert 0 <= ledger.data_wait_s <= ledger.productive_s + ledger.repeated_s + 1e-6
    if ledger.ratio is not None:
        assert ledger.effective_ratio is not None and 0 <= ledger.ratio <= ledger.effective_ratio <= 1
    return ledger


def nonzero_parts(ledger: Goodput) -> dict[str, float]:
    """Return the parts of the ledger that are not 0."""
    return {part: pytest.approx(v) for part in TIME_CATEGORIES if (v := getattr(ledger, part)) > 1e-6}


def preempted_and_resumed(folder: Path) -> History:
    """100 s: queue until 10, attempt 1 until 50, queue until 60, then attempt 2, which resumes step 15 of 20."""
    history = History(folder)
    first = history.attempt(1, 10.0)
    first.t = 20.0
    for step in range(1, 21):
        first.step(step, 1.0, wait_s=0.25)
        if step == 10:
            first.timed_event("checkpoint", "stall_s", 2.0, step=10, save_s=5.0)
    first.t += 1.0
    first.event("stop_agreed", step=20)
    first.batch_event(50.0, "ended", ending="preempted", last_step=20)
    first.batch_event(50.5, "requeued", method="requeue", job_id="7")
    first.write()
    second = history.attempt(2, 60.0)
    second.t = 65.0
    second.timed_event("restored", "restore_s", 3.0, step=15)
    second.t = 70.0
    for step in range(16, 41):
        second.step(step, 1.0 if 16 < step < 21 else 0.5)
    second.timed_event("checkpoint", "stall_s", 4.0, step=40, save_s=4.0)
    second.batch_event(100.0, "ended", ending="completed", last_step=40)
    second.write()
    return history


def write_completed_step(history: History, n: int, *, start: float) -> None:
    """Write attempt ``n``, which runs step ``n`` in 5 s from its start and then completes."""
    attempt = history.attempt(n, start)
    attempt.t = start
    attempt.step(n, 5.0)
    attempt.batch_event(start + 5.0, "ended", ending="completed")
    attempt.write()


def test_each_part_holds_the_measured_time(tmp_path: Path) -> None:
    ledger = compute_ledger(preempted_and_resumed(tmp_path), 500.0)
    assert ledger.wall_s == pytest.approx(100.0)
    assert nonzero_parts(ledger) == {
        "queue_s": 10.0 + 10.0,
        "startup_s": 10.0 + 7.0,
        "restore_s": 3.0,
        "productive_s": 20.0 + 20 * 0.5,
        "repeated_s": 4.5,  # steps 16 to 20, with their own times rather than a share of all
        "checkpoint_stall_s": 2.0 + 4.0,  # includes the save after the last step
        "shutdown_s": 50.0 - 42.0 + 100.0 - 88.5,
    }
    assert ledger.data_wait_s == pytest.approx(20 * 0.25)
    assert ledger.ratio == pytest.approx(0.30)
    assert ledger.effective_ratio == pytest.approx(30.0 / 80.0)


def test_rows_with_many_scalars_are_counted_like_short_rows(tmp_path: Path) -> None:
    history = History(tmp_path)
    scalars = {f"gradient_norm_of_layer_{n}": n / 7 for n in range(110)}
    first = history.attempt(1, 0.0)
    for step in range(1, 101):
        first.step(step, 1.0 if step > 1 else 6.0, **scalars)
    first.batch_event(106.0, "ended", ending="node_failure")
    first.write()
    assert nonzero_parts(compute_ledger(history, 500.0)) == {"productive_s": 100.0, "startup_s": 5.0, "lost_s": 1.0}
    assert metrics.read_last_row(history.run.metrics_path(1))["step"] == 100  # type: ignore[index]


def test_a_killed_attempt_loses_what_followed_its_last_step(tmp_path: Path) -> None:
    history = History(tmp_path)
    first = history.attempt(1, 10.0)
    first.t = 20.0
    first.step(1, 10.0)
    first.step(2, 10.0)
    first.batch_event(90.0, "ended", ending="node_failure")
    first.write()
    assert nonzero_parts(compute_ledger(history, 90.0)) == {
        "queue_s": 10.0, "startup_s": 10.0, "productive_s": 20.0, "lost_s": 50.0,
    }  # fmt: skip


def test_attempt_killed_before_its_first_step_is_all_startup(tmp_path: Path) -> None:
    history = History(tmp_path)
    first = history.attempt(1, 10.0)
    first.t = 15.0
    first.event("session_started", world_size=2)
    first.timed_event("restored", "restore_s", 5.0, step=3)
    first.batch_event(50.0, "ended", ending="hang")
    first.write()
    assert nonzero_parts(compute_ledger(history, 60.0)) == {"queue_s": 10.0, "startup_s": 35.0, "restore_s": 5.0}


def test_extra_time_of_the_first_step_is_startup(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    first = history.attempt(1, 0.0)
    first.t = 10.0
    first.step(1, 62.0)  # compiles
    for step in range(2, 12):
        first.step(step, 2.0)
    first.batch_event(first.t, "ended", ending="completed")
    first.write()
    assert nonzero_parts(compute_ledger(history, 500.0)) == {"startup_s": 70.0, "productive_s": 22.0}


def test_evaluations_before_and_within_steps_are_evaluation(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    first = history.attempt(1, 0.0)
    first.t = 4.0
    first.timed_event("evaluation", "eval_s", 6.0, step=0)
    first.step(1, 2.0)
    first.timed_event("evaluation", "eval_s", 3.0, step=1)  # the session subtracts it from step 2
    first.step(2, 2.0)
    first.timed_event("evaluation", "eval_s", 5.0, step=2)
    first.batch_event(25.0, "ended", ending="completed")
    first.write()
    assert nonzero_parts(compute_ledger(history, 99.0)) == {
        "startup_s": 4.0, "evaluation_s": 14.0, "productive_s": 4.0, "shutdown_s": 3.0,
    }  # fmt: skip


def test_unexplained_time_between_steps_is_other(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    first = history.attempt(1, 0.0)
    for step in range(1, 5):
        first.step(step, 1.0)
        first.t += 0.5
    first.batch_event(5.5, "ended", ending="completed")
    first.write()
    assert nonzero_parts(compute_ledger(history, 99.0)) == {"productive_s": 4.0, "other_s": 1.5}


def test_script_without_steps_has_no_ratio(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    first = history.attempt(1, 0.0)
    first.batch_event(5.0, "ranks_started", world_size=1)
    first.batch_event(100.0, "ended", ending="completed")
    first.write()
    ledger = compute_ledger(history, 100.0)
    assert nonzero_parts(ledger) == {"startup_s": 5.0, "other_s": 95.0}
    assert (ledger.ratio, ledger.effective_ratio) == (None, None)  # what the script did is unknown
    history.run.spec.write_text("[job]\n")
    assert compute_ledger(history, 100.0).ratio == 0.0  # the built-in trainer would have reported a step


def test_time_since_the_last_row_of_a_running_attempt_is_other(tmp_path: Path) -> None:
    history = History(tmp_path)
    first = history.attempt(1, 10.0)
    first.t = 12.0
    first.step(1, 4.0)
    first.write()
    assert nonzero_parts(compute_ledger(history, 30.0, finished=False)) == {
        "queue_s": 10.0, "startup_s": 2.0, "productive_s": 4.0, "other_s": 14.0,
    }  # fmt: skip


@pytest.mark.parametrize(("finished", "queue_s"), [(False, 40.0), (True, 25.0)])
def test_run_cancelled_before_its_start_waited_until_then(tmp_path: Path, finished: bool, queue_s: float) -> None:
    history = History(tmp_path, 10.0)
    history.run_event(35.0, "cancelled", user="me")
    assert nonzero_parts(compute_ledger(history, 50.0, finished=finished)) == {"queue_s": queue_s}


def test_requeued_job_waits_in_the_queue_until_cancelled(tmp_path: Path) -> None:
    history = History(tmp_path)
    first = history.attempt(1, 0.0)
    first.step(1, 5.0)
    first.batch_event(5.0, "ended", ending="preempted")
    first.batch_event(5.5, "requeued", method="requeue", job_id="7")
    first.write()
    assert nonzero_parts(compute_ledger(history, 1005.0, finished=False)) == {"productive_s": 5.0, "queue_s": 1000.0}
    history.run_event(205.0, "cancelled", user="me")
    assert nonzero_parts(compute_ledger(history, 1005.0)) == {"productive_s": 5.0, "queue_s": 200.0}


def test_wait_after_a_node_failure_starts_at_the_last_sign_of_life(tmp_path: Path) -> None:
    history = History(tmp_path)
    first = history.attempt(1, 0.0)
    first.step(1, 5.0)
    first.write()
    ledger = goodput.compute_goodput(history.run, attempts.load_attempts(history.run), 105.0, False, is_queued=True)
    assert nonzero_parts(ledger) == {"productive_s": 5.0, "queue_s": 100.0}


def test_time_before_an_ended_run_is_continued_does_not_count(tmp_path: Path) -> None:
    history = History(tmp_path)
    first = history.attempt(1, 0.0)
    first.step(1, 5.0)
    first.batch_event(5.0, "ended", ending="failed")
    first.batch_event(5.5, "stopped", reason="it would fail again")
    first.write()
    history.run_event(86_400.0, "continued", user="me")
    history.run_event(86_401.0, "continued", job_id="8")
    write_completed_step(history, 2, start=86_410.0)
    assert nonzero_parts(compute_ledger(history, 90_000.0)) == {"productive_s": 10.0, "queue_s": 10.0}


def test_time_before_a_killed_run_is_continued_does_not_count(tmp_path: Path) -> None:
    history = History(tmp_path)
    first = history.attempt(1, 0.0)
    first.step(1, 5.0)
    first.write()
    history.run_event(200_000.0, "continued", user="me")
    write_completed_step(history, 2, start=200_010.0)
    assert nonzero_parts(compute_ledger(history, 300_000.0)) == {"productive_s": 10.0, "queue_s": 10.0}


def test_attempt_without_an_end_ends_at_its_last_sign_of_life(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    first = history.attempt(1, 0.0)
    first.step(1, 5.0)
    first.write()
    second = history.attempt(2, 100.0)
    second.t = 100.0
    second.step(1, 5.0)
    second.step(2, 5.0)
    second.write()
    assert nonzero_parts(compute_ledger(history, 10_000.0)) == {
        "productive_s": 10.0,
        "repeated_s": 5.0,
        "queue_s": 95.0,
    }


def test_attempt_that_ends_late_is_cut_at_the_start_of_the_next(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    first = history.attempt(1, 0.0)
    first.step(1, 5.0)
    first.batch_event(3600.0, "ended", ending="node_failure")  # from a host whose clock is ahead
    first.write()
    write_completed_step(history, 2, start=20.0)
    assert nonzero_parts(compute_ledger(history, 90.0)) == {"productive_s": 10.0, "lost_s": 15.0}


def test_steps_of_three_attempts_count_once(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    for n, (first, last) in enumerate([(1, 30), (11, 20), (11, 40)], start=1):
        attempt = history.attempt(n, 100.0 * n)
        attempt.t = 100.0 * n
        for step in range(first, last + 1):
            attempt.step(step, n / 10)
            if step % 7 == 0:
                attempt.timed_event("checkpoint", "stall_s", 0.01, step=step, save_s=0.02)
        attempt.batch_event(attempt.t, "ended", ending="preempted")
        attempt.write()
    ledger = compute_ledger(history, 0.0)
    assert ledger.productive_s == pytest.approx(30 * 0.1 + 10 * 0.3)
    assert ledger.repeated_s == pytest.approx(10 * 0.2 + 20 * 0.3)


def test_rows_of_an_older_version_have_no_sums(tmp_path: Path) -> None:
    history = preempted_and_resumed(tmp_path)
    new = compute_ledger(history, 100.0)
    for n in (1, 2):
        path = history.run.metrics_path(n)
        path.write_text(path.read_text().replace("sum_step_s", "my_step_s"))
    assert compute_ledger(history, 100.0).repeated_s == pytest.approx(new.repeated_s)
    assert compute_ledger(history, 100.0).productive_s == pytest.approx(new.productive_s)


def test_clock_that_is_set_back_scales_parts_to_the_wall_time(tmp_path: Path) -> None:
    history = History(tmp_path, None)
    first = history.attempt(1, 0.0)
    first.t = 10.0
    for step in range(1, 9):
        first.step(step, 10.0, wait_s=5.0)
    first.t -= 60.0
    first.step(9, 10.0)
    first.timed_event("checkpoint", "stall_s", 500.0, step=9, save_s=500.0)
    first.batch_event(45.0, "ended", ending="completed")
    first.write()
    ledger = compute_ledger(history, 99.0)
    assert ledger.wall_s == pytest.approx(45.0)
    assert ledger.productive_s == pytest.approx(30.0)
    assert ledger.data_wait_s == pytest.approx(40.0 * 30.0 / 90.0)


def test_submission_dated_after_the_end_does_not_hide_the_run(tmp_path: Path) -> None:
    history = History(tmp_path, 1000.0)
    write_completed_step(history, 1, start=10.0)
    assert nonzero_parts(compute_ledger(history, 15.0)) == {"productive_s": 5.0}


@pytest.mark.parametrize("seed", range(40))
def test_parts_sum_and_are_not_negative_with_random_clocks(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    def random_time() -> float:
        return rng.choice([rng.uniform(-100, 1000), rng.uniform(0, 100), rng.uniform(0, 1) * 1e9])

    history = History(tmp_path, rng.choice([None, random_time()]))
    for n in range(1, rng.randrange(1, 6)):
        attempt = history.attempt(n, rng.choice([None, random_time(), 100.0 * n]))
        attempt.t = rng.choice([random_time(), 100.0 * n])
        _write_random_records(attempt, rng)
        if rng.random() < 0.6:
            attempt.batch_event(
                random_time(), "ended", ending=rng.choice(["completed", "preempted", "hang", "cancelled"])
            )
        if rng.random() < 0.3:
            attempt.batch_event(random_time(), "stopped", reason="no progress")
        attempt.write()
    for name in ("continued", "cancelled"):
        if rng.random() < 0.4:
            history.run_event(random_time(), name)
    for finished in (True, False):
        compute_ledger(history, random_time(), finished=finished)


def _write_random_records(attempt: AttemptWriter, rng: random.Random) -> None:
    step = rng.randrange(20)
    for _ in range(rng.randrange(30)):
        what = rng.randrange(8)
        if what == 0:
            attempt.timed_event("checkpoint", "stall_s", rng.uniform(0, 400), step=step, save_s=rng.uniform(0, 20))
        elif what == 1:
            attempt.timed_event("evaluation", "eval_s", rng.uniform(0, 60), step=step)
        elif what == 2:
            attempt.timed_event("restored", "restore_s", rng.uniform(0, 60), step=step)
        elif what == 3:
            attempt.t += rng.uniform(-200, 200)
        elif what == 4:
            attempt.event(rng.choice(["stop_agreed", "session_started", "ranks_started"]))
        else:
            step += 1
            attempt.step(step, rng.uniform(0, 5), wait_s=rng.uniform(0, 9))


def test_ledgers_of_the_attempts_sum_to_that_of_the_run(tmp_path: Path) -> None:
    history = preempted_and_resumed(tmp_path)
    whole = compute_ledger(history, 500.0)
    first, second = (compute_ledger(history, 500.0, time_range=TimeRange(attempt=n)) for n in (1, 2))
    assert (first.wall_s, second.wall_s) == (
        pytest.approx(50.0),
        pytest.approx(50.0),
    )  # each includes the wait before it
    assert first.repeated_s == 0 and second.repeated_s == pytest.approx(whole.repeated_s)
    for part in TIME_CATEGORIES:
        assert getattr(first, part) + getattr(second, part) == pytest.approx(getattr(whole, part)), part


def test_ledger_shrinks_as_its_time_range_starts_later(tmp_path: Path) -> None:
    history = preempted_and_resumed(tmp_path)
    whole = compute_ledger(history, 500.0)
    assert compute_ledger(history, 500.0, time_range=TimeRange(since=-1.0)) == whole
    previous = whole
    for since in (5.0, 15.0, 25.5, 31.0, 49.0, 55.0, 64.0, 67.5, 72.3, 90.0, 99.9):
        ledger = compute_ledger(history, 500.0, time_range=TimeRange(since=since))
        assert ledger.wall_s == pytest.approx(100.0 - since)
        for part in TIME_CATEGORIES:
            assert getattr(ledger, part) <= getattr(previous, part) + 1e-6, (since, part)
        previous = ledger
    assert compute_ledger(history, 500.0, time_range=TimeRange(since=200.0)) == Goodput()


def test_time_range_that_starts_within_a_step(tmp_path: Path) -> None:
    """The range starts in the middle of step 18, which ends at 72.5. Three steps are repeated, then 20 take 0.5 s."""
    ledger = compute_ledger(preempted_and_resumed(tmp_path), 500.0, time_range=TimeRange(since=72.0))
    assert nonzero_parts(ledger)["repeated_s"] == pytest.approx(2.5)
    assert nonzero_parts(ledger)["productive_s"] == pytest.approx(10.0)
    assert nonzero_parts(ledger)["checkpoint_stall_s"] == pytest.approx(4.0)
    assert set(nonzero_parts(ledger)) == {"repeated_s", "productive_s", "checkpoint_stall_s", "shutdown_s"}
