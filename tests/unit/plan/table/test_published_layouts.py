"""Rows that were collected after the formulas: their sources, and how the planner does on them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import planner, planner_sets
from benchmarks.planner import Case
from clustertrain.plan.table import predict


@pytest.fixture(scope="module")
def cases() -> Sequence[Case]:
    return planner.predict_rows(planner.read_rows(planner.FURTHER_TABLE))


@pytest.mark.long
def test_rows_have_source_publisher_and_outcome(cases: Sequence[Case]) -> None:
    assert len(cases) >= 150
    assert {case.half for case in cases} == {planner.FITTING, planner.HELD_OUT}
    for case in cases:
        assert case.source.startswith("https://") and case.row["publisher"], case.row
        assert any(case.row[name] for name in planner.OUTCOME if name != "fits"), case.row
        assert case.predicted.fits is not None, case.predicted.note
    publishers = [{c.row["publisher"] for c in cases if c.half == half} for half in (0, 1)]
    assert not publishers[0] & publishers[1]


def test_configurations_that_ran_fit(cases: Sequence[Case]) -> None:
    assert planner.summarize_fits(cases)["ran_predicted_not_to_fit_share"] <= 0.03


def test_held_out_rows_are_near(cases: Sequence[Case]) -> None:
    """Far above the measured errors (docs/explanation/planner.md), so that only a mistake fails."""
    held_out = [case for case in cases if case.half == planner.HELD_OUT]
    throughput = planner.Errors.collect(held_out, planner.throughput_ratio).summarize()
    memory = planner.Errors.collect(held_out, lambda case: case.memory_ratio).summarize()
    assert throughput["median"] < 0.18 and memory["median"] < 0.08 and memory["p90"] < 0.3


def test_prediction_of_benchmark_is_blind(cases: Sequence[Case]) -> None:
    row = {name: cell for name, cell in cases[0].row.items() if name not in planner.OUTCOME}
    assert predict.predict([row]) == [cases[0].predicted]


def test_table_of_sets_and_goals(cases: Sequence[Case]) -> None:
    few = [case for half in (0, 1) for case in [c for c in cases if c.half == half and c.memory_ratio][:6]]
    sets = planner_sets.summarize(few, few)
    lines = list(planner_sets.format_table(sets))
    assert len(lines) == 2 + 4 * len(planner_sets.HIDDEN)
    assert len({line.count("|") for line in lines}) == 1
    checked = planner_sets.check_goals(sets)
    assert [met for *_, met in checked[:4]] == [value <= float(goal.split()[-1]) for _, value, goal, _ in checked[:4]]
