"""The arithmetic of ``benchmarks.checkpoint``: its verdicts from the measured seconds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.checkpoint import Comparison, build_rows, compute_medians, finish, parse_size, round_order
from benchmarks.checkpoint_state import choose_shapes, count_bytes
from benchmarks.measure import CannotRun
from benchmarks.verdict import Goal, interval, verdict

AT_MOST, AT_LEAST, LESS = Goal(1.3, "at most"), Goal(0.9, "at least"), Goal(1.0, "less than")


def test_interval_of_seven_omits_one_at_either_end() -> None:
    assert interval([3, 1, 7, 2, 6, 5, 4]) == (2, 6)
    assert interval([1, 2, 3, 4, 5, 6, 1000]) == (2, 6)


def test_interval_of_few_omits_none_and_of_many_omits_more() -> None:
    assert interval([1]) == (1, 1)
    assert interval([2, 1, 3]) == (1, 3)
    assert interval(range(11)) == (2, 8)  # 93 %; from 3 to 7 it is 77 %


@pytest.mark.parametrize(
    ("ratios", "goal", "expected"),
    [
        ([1.2, 1.2, 1.2, 1.2, 1.2, 1.2, 9.0], AT_MOST, "met"),
        ([1.4, 1.5, 1.4, 1.6, 1.4, 1.9, 0.5], AT_MOST, "missed"),
        ([0.3, 0.5, 0.9, 1.2, 1.6, 1.9, 2.2], AT_MOST, "noisy"),
        # The goal is inside the interval, but the interval is narrow enough: 0.1 to either side, of the 0.3 allowed.
        ([1.15, 1.2, 1.25, 1.29, 1.35, 1.4, 1.5], AT_MOST, "met"),
        ([1.15, 1.2, 1.25, 1.31, 1.35, 1.4, 1.5], AT_MOST, "missed"),
        # Far from the goal, the spread does not matter.
        ([0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.2], AT_MOST, "met"),
        ([0.92, 0.95, 0.99, 1.0, 1.1, 1.2, 2.0], AT_LEAST, "met"),
        ([0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 2.0], AT_LEAST, "missed"),
        ([0.5, 0.7, 0.8, 0.95, 1.0, 1.1, 2.0], AT_LEAST, "noisy"),
        # "Less than a peer" allows no margin, so the goal must lie outside the interval.
        ([0.9, 0.91, 0.93, 0.95, 0.97, 0.99, 1.5], LESS, "met"),
        ([0.9, 0.95, 0.99, 0.995, 1.001, 1.002, 1.5], LESS, "noisy"),
        ([1.0] * 7, LESS, "missed"),
        ([0.1] * 6, LESS, "noisy"),  # too few
    ],
)
def test_verdict_depends_on_interval_and_goal(ratios: list[float], goal: Goal, expected: str) -> None:
    assert verdict(ratios, goal) == expected


def test_ratios_compare_within_a_round_and_invert_for_at_least() -> None:
    rounds = [
        {"a": {"stall": 2.0}, "b": {"stall": 1.0}},
        {"a": {"stall": 5.0}},
        {"a": {"stall": 3.0}, "b": {"stall": 6.0}},
    ]
    assert Comparison("", "stall", "a", "b", AT_MOST).ratios(rounds) == [2.0, 0.5]
    assert Comparison("", "stall", "a", "b", None).ratios(rounds) == [2.0, 0.5]
    assert Comparison("", "stall", "a", "b", AT_LEAST).ratios(rounds) == [0.5, 2.0]
    assert Comparison("", "durable", "a", "b", AT_MOST).ratios(rounds) == []


def test_row_has_the_figures_behind_its_verdict() -> None:
    rounds = [{"clustertrain": {"stall": s}, "copy": {"stall": 1.0}} for s in (1.0, 1.1, 1.1, 1.2, 1.2, 1.2, 8.0)]
    (row,) = build_rows(rounds, {"ranks": 2})
    assert (row["ranks"], row["ours"], row["base"], row["pairs"]) == (2, "clustertrain", "copy", 7)
    assert row["ratio"] == {"median": 1.2, "min": 1.0, "max": 8.0, "low": 1.1, "high": 1.2}
    assert (row["goal"], row["verdict"]) == ("at most 1.3", "met")


def test_seconds_of_gives_medians_and_speeds() -> None:
    rounds = [{"x": {"stall": s, "durable": 2 * s}} for s in (1.0, 2.0, 9.0)]
    assert compute_medians(rounds, 8_000_000_000) == {"x": {"stall_s": 2.0, "durable_s": 4.0, "durable_gb_per_s": 2.0}}


def test_order_of_a_round_rotates_and_alternates() -> None:
    orders = [round_order("abcd", n) for n in range(4)]
    assert orders == [list("abcd"), list("adcb"), list("cdab"), list("cbad")]


@pytest.mark.parametrize("size", [16 << 20, 64 << 20, 1 << 30, 4 << 30])
def test_state_has_the_requested_size(size: int) -> None:
    assert 0.98 * size < count_bytes(choose_shapes(size)) < 1.02 * size


def test_size_needs_a_unit_and_a_minimum() -> None:
    assert (parse_size("64MiB"), parse_size("4GiB")) == (64 << 20, 4 << 30)
    for text in ("64", "64MB", "1MiB", "-1GiB", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="a size is like"):
            parse_size(text)


@pytest.fixture
def results_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    return tmp_path / "results" / "checkpoint.json"


def make_result(*verdicts: str) -> dict[str, list[dict[str, str | None]]]:
    return {"rows": [*({"goal": "at most 1.3", "verdict": v} for v in verdicts), {"goal": None, "verdict": None}]}


def test_missed_goal_exits_with_1(results_path: Path) -> None:
    assert finish(make_result("met", "met")) == 0
    assert finish(make_result("met", "missed", "noisy")) == 1
    assert [row["verdict"] for row in json.loads(results_path.read_text())["rows"]] == ["met", "missed", "noisy", None]


def test_noisy_rows_are_written_and_reported(results_path: Path) -> None:
    with pytest.raises(CannotRun, match="1 of 2 rows are noisy"):
        finish(make_result("met", "noisy"))
    assert results_path.exists()


def test_nothing_is_written_if_all_rows_are_noisy(results_path: Path) -> None:
    with pytest.raises(CannotRun, match="nothing is written"):
        finish(make_result("noisy", "noisy"))
    assert not results_path.exists()
