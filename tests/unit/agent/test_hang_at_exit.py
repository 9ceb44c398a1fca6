"""Ranks that hang at their end."""

from __future__ import annotations

from clustertrain.agent.hang_at_exit import CHECK_INTERVAL_S, PATIENCE_S, ExitHangDetector


def ended_after(used_per_s: float, *, others_done_from_s: float = 0.0, until_s: float = 5000.0) -> float | None:
    """Seconds until what is left counts as hanging."""
    end, now = ExitHangDetector(), 0.0
    while now <= until_s:
        if end.is_hanging(now, now >= others_done_from_s, {17: used_per_s * now}):
            return now
        now += CHECK_INTERVAL_S
    return None


def test_a_rank_that_does_nothing_is_ended_when_the_patience_is_over() -> None:
    assert ended_after(0.0) == PATIENCE_S
    assert ended_after(0.001) == PATIENCE_S


def test_a_rank_that_works_is_waited_for() -> None:
    assert ended_after(0.02) is None


def test_the_patience_begins_when_the_others_are_done() -> None:
    late = ended_after(0.0, others_done_from_s=1000.0)
    assert late is not None and 1000.0 + PATIENCE_S - CHECK_INTERVAL_S <= late <= 1000.0 + PATIENCE_S + CHECK_INTERVAL_S


def test_work_in_between_starts_the_patience_again() -> None:
    end, used = ExitHangDetector(), {17: 0.0}
    assert not any(end.is_hanging(t, True, used) for t in range(0, 590, 10))
    assert not end.is_hanging(590.0, True, {17: 1.0, 18: 2.0})
    assert not any(end.is_hanging(t, True, {17: 1.0}) for t in range(600, 1190, 10))
    assert end.is_hanging(1190.0, True, {17: 1.0})
