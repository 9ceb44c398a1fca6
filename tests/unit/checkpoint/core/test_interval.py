"""Tests of when a checkpoint is due."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from clustertrain import clock
from clustertrain.checkpoint.core import interval
from clustertrain.checkpoint.core.interval import (
    CheckpointInterval,
    FailureHistory,
    count_failures,
    young_daly_interval_s,
)
from clustertrain.errors import ConfigError
from clustertrain.run.attempts import Attempt

HOUR = 3600.0
# Without a prior: the MTBF follows from this history alone.
HISTORY = FailureHistory(count=9, trained_s=79.0 * HOUR, prior_mtbf_s=0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Clock:
    return Clock()


def test_interval_in_steps_ignores_the_clock(time: Clock) -> None:
    every = CheckpointInterval(3, monotonic=time)
    assert not every.is_timed
    assert every.seconds is None
    before = [every.is_due_at(s) for s in range(1, 8)]
    assert before == [False, False, True, False, False, True, False]
    time.now += 1e9
    every.restart_timer()
    every.record_save(5.0, 50.0)
    assert [every.is_due_at(s) for s in range(1, 8)] == before
    assert not every.is_overdue()
    assert every.format_explanation() == "every 3 steps"


@pytest.mark.parametrize("every", [100, "10min", "auto"])
def test_milestones_are_due_in_addition(every: int | str, time: Clock) -> None:
    due = CheckpointInterval(every, milestone=250, monotonic=time)
    expected = {100, 200, 250, 300, 400, 500} if every == 100 else {250, 500}
    assert {s for s in range(1, 501) if due.is_due_at(s)} == expected


def test_timed_interval_runs_from_the_previous_save(time: Clock) -> None:
    every = CheckpointInterval("1min", monotonic=time)
    assert every.is_timed
    assert every.seconds == 60
    time.now += 59
    assert not every.is_overdue()
    time.now += 1
    assert every.is_overdue()
    time.now += 30
    assert every.is_overdue()  # until the save is made
    every.restart_timer()
    assert not every.is_overdue()
    time.now += 60
    assert every.is_overdue()
    every.record_save(100.0, 1000.0)  # the cost does not change an interval that the user chose
    assert every.seconds == 60
    assert every.format_explanation() == "every 60 s"
    assert not any(every.is_due_at(s) for s in range(1, 1000))


def test_wall_clock_is_not_read(time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> float:
        raise AssertionError("the wall clock was read")

    monkeypatch.setattr(clock, "now", fail)
    every = CheckpointInterval("auto", monotonic=time)
    time.now += 10_000
    assert every.is_overdue()
    every.restart_timer()
    every.record_save(1.0, 2.0)
    assert not every.is_overdue()
    assert every.format_explanation()


@pytest.mark.parametrize("every", ["often", "30", "", "-5s", "10 hours", 0, -1, "0s"])
def test_invalid_interval_is_refused(every: int | str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_every = "):
        CheckpointInterval(every)


def expected_time(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the expected seconds per second of work if failures are a Poisson process (Daly 2006, without restart)."""
    return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(0.8, 7.9 * HOUR), (6.3, 7.9 * HOUR), (10.0, HOUR), (60.0, 2 * HOUR)])
def test_young_daly_interval_is_near_optimal(cost_s: float, mtbf_s: float) -> None:
    best = young_daly_interval_s(cost_s, mtbf_s)
    minimum = min(expected_time(best * f / 100, cost_s, mtbf_s) for f in range(10, 1000))
    assert expected_time(best, cost_s, mtbf_s) - 1 < 1.05 * (minimum - 1)
    for factor in (0.5, 2.0):
        assert expected_time(best * factor, cost_s, mtbf_s) > expected_time(best, cost_s, mtbf_s)


def test_auto_uses_measured_stall_and_failure_rate(time: Clock) -> None:
    every = CheckpointInterval("auto", history=HISTORY, monotonic=time)
    every.record_save(0.8, 2.0)
    assert every.seconds == pytest.approx(math.sqrt(2 * 0.8 * 7.9 * HOUR))
    assert every.format_explanation() == "every 213 s: stall 0.8 s, 7.9 h between failures"
    time.now += 212
    assert not every.is_overdue()
    time.now += 2
    assert every.is_overdue()


def test_slower_steps_during_write_count_as_cost(time: Clock) -> None:
    every = CheckpointInterval("auto", history=HISTORY, monotonic=time)
    every.record_save(0.8, 20.8, slowdown_fraction=0.1)
    assert every.seconds == pytest.approx(math.sqrt(2 * (0.8 + 0.1 * 20.0) * 7.9 * HOUR))
    assert every.format_explanation() == "every 399 s: stall 0.8 s and 2 s by slower steps, 7.9 h between failures"


def test_stall_is_assumed_before_first_save(time: Clock) -> None:
    every = CheckpointInterval("auto", monotonic=time)
    assert every.seconds == pytest.approx(math.sqrt(2 * interval.ASSUMED_STALL_S * 24 * HOUR))
    assert every.format_explanation() == "every 416 s: stall 1 s (assumed), 24 h between failures (none seen)"


def test_single_slow_save_does_not_change_interval(time: Clock) -> None:
    every = CheckpointInterval("auto", history=HISTORY, monotonic=time)
    for stall_s in (9.0, *[0.8] * 8, 30.0, 0.8):
        every.record_save(stall_s, stall_s)
    assert every.seconds == pytest.approx(young_daly_interval_s(0.8, 7.9 * HOUR))
    for _ in range(interval.COST_WINDOW):
        every.record_save(2.0, 2.0)
    assert every.seconds == pytest.approx(young_daly_interval_s(2.0, 7.9 * HOUR))


@pytest.mark.parametrize(
    ("stall_s", "save_s", "seconds", "explanation"),
    [
        (0.001, 0.01, 30.0, "every 30 s, the shortest: stall 0.001 s, 7.9 h"),
        (0.8, 60.0, 600.0, "every 600 s, ten times a save: stall 0.8 s, 7.9 h"),
        (400.0, 300.0, 3600.0, "every 3600 s, the longest: stall 400 s, 7.9 h"),
        (400.0, 600.0, 6000.0, "every 6000 s, ten times a save: stall 400 s, 7.9 h"),
    ],
)
def test_auto_interval_bounds(time: Clock, stall_s: float, save_s: float, seconds: float, explanation: str) -> None:
    every = CheckpointInterval("auto", history=HISTORY, monotonic=time)
    every.record_save(stall_s, save_s)
    assert every.seconds == pytest.approx(seconds)
    assert every.format_explanation() == f"{explanation} between failures"


def test_failure_free_time_counts_at_next_save(time: Clock) -> None:
    every = CheckpointInterval(
        "auto", history=FailureHistory(count=1, trained_s=2 * HOUR, prior_mtbf_s=24 * HOUR), monotonic=time
    )
    every.record_save(0.8, 0.8)
    assert every.seconds == pytest.approx(young_daly_interval_s(0.8, 13 * HOUR))
    time.now += 10 * HOUR
    assert every.seconds == pytest.approx(young_daly_interval_s(0.8, 13 * HOUR))
    every.record_save(0.8, 0.8)
    assert every.seconds == pytest.approx(young_daly_interval_s(0.8, 18 * HOUR))


# -- MTBF


def attempt(ending: str | None, *, trained_s: float = HOUR, **changes: Any) -> Attempt:
    """Return an attempt that trained steps 101 to 150 and committed step 140 last."""
    fields = {
        "n": 1, "job_id": "7", "restart": 0, "nodes": ("a",), "host": "a", "start": 1000.0, "end": 1000.0 + trained_s,
        "ending": ending, "reason": None, "first_step": 101, "last_step": 150, "restored_step": 100,
        "committed_step": 140, "requeued": None, "stopped": None,
    }  # fmt: skip
    return Attempt(**{**fields, **changes})


@pytest.mark.parametrize(
    ("ending", "lost", "counts"),
    [
        ("node_failure", True, True),
        ("out_of_memory", True, True),
        ("hang", True, True),
        ("communication", True, True),
        ("failed", True, True),
        ("node_failure", False, True),  # it only happened to save just before
        ("preempted", False, False),
        ("preempted", True, True),
        ("time_limit", False, False),
        ("time_limit", True, True),
        ("unknown", False, False),
        ("unknown", True, True),
        ("completed", True, False),
        ("cancelled", True, False),
    ],
)
def test_which_endings_count_as_failures(ending: str, lost: bool, counts: bool) -> None:
    history = count_failures([attempt(ending, committed_step=140 if lost else 150)], nodes=1)
    assert (history.count, history.trained_s) == (counts, HOUR)


def test_attempt_without_steps_is_not_a_failure() -> None:
    history = count_failures([attempt("node_failure", first_step=None, last_step=None, committed_step=None)], nodes=1)
    assert (history.count, history.trained_s) == (0, 0.0)


def test_running_attempt_is_ignored() -> None:
    history = count_failures([attempt(None, end=None), attempt(None)], nodes=1)
    assert (history.count, history.trained_s) == (0, 0.0)


def test_stop_right_after_restore_is_not_a_failure() -> None:
    history = count_failures([attempt("preempted", last_step=None, committed_step=None)], nodes=1)
    assert history.count == 0
    assert count_failures([attempt("preempted", last_step=101, committed_step=None)], nodes=1).count == 1


def test_negative_duration_counts_as_zero() -> None:
    history = count_failures([attempt("node_failure", trained_s=-500.0), attempt("hang", start=None)], nodes=1)
    assert (history.count, history.trained_s) == (2, 0.0)


def test_prior_mtbf_is_a_day_and_shrinks_with_nodes() -> None:
    single, medium, large = (count_failures([], nodes=n).mtbf_s() / HOUR for n in (1, 128, 2048))
    assert single == pytest.approx(24.0, rel=0.01)
    assert medium == pytest.approx(1 / (1 / 24 + 128 / (1.8 * 2048)))
    assert large == pytest.approx(1.67, rel=0.01)


def test_few_failures_outweigh_the_prior() -> None:
    rng = random.Random(1)
    attempts = [attempt("node_failure", trained_s=rng.expovariate(1 / (3 * HOUR))) for _ in range(60)]
    means = [count_failures(attempts[:n], nodes=1).mtbf_s() / HOUR for n in (0, 1, 10, 60)]
    assert means[0] > means[1] > means[2]
    assert means[2] == pytest.approx(3.0, rel=0.9)
    assert means[3] == pytest.approx(3.0, rel=0.4)
