"""The plan's memory compared with the peaks that ``make fake-memory`` traced with torch's memory tracker."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, get_args

import pytest

from benchmarks import measure
from clustertrain import fsio
from clustertrain.config.optimizers import OptimizerName
from clustertrain.plan.cost import memory
from clustertrain.plan.cost.trainer_memory import LowerBounds
from tests.harness.fake_cluster.memory_categories import COMPARED, category_errors
from tests.harness.fake_cluster.memory_cells import LARGER, MemoryCell, draw_cells

MEDIAN, WORST = 0.03, 0.08


@pytest.fixture(scope="module")
def traced() -> list[tuple[MemoryCell, float]]:
    """Return the cells of the results with their peaks in GiB."""
    result: Any = fsio.read_json(measure.RESULTS / "fake_memory.json")
    rows: Mapping[str, Any] = {row["cell"]: row for row in result["rows"]}
    cells = [cell for cell in draw_cells() if cell.name in rows]
    assert len(cells) == len(rows)
    return [(cell, sum(rows[cell.name]["traced_gib"].values())) for cell in cells]


def predict_allocated(cell: MemoryCell) -> float:
    return sum(n for category, n in cell.predict().items() if category != "overhead")


@pytest.mark.long
def test_predictions_match_traces(traced: list[tuple[MemoryCell, float]]) -> None:
    ratios = {cell.name: predict_allocated(cell) / peak for cell, peak in traced}
    far = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > WORST}
    assert far == pytest.approx(LARGER, abs=0.001)
    assert statistics.median(abs(ratio - 1) for ratio in ratios.values()) <= MEDIAN


def test_categories_match_traces() -> None:
    """Errors are fractions of the peak. Where two moments need about the same, the other one may be predicted."""
    result: Any = fsio.read_json(measure.RESULTS / "fake_memory.json")
    traced = {row["cell"]: row["traced_gib"] for row in result["rows"] if row["by_category"]}
    errors = [category_errors(cell.predict(), traced[cell.name]) for cell in draw_cells() if cell.name in traced]
    assert len(errors) >= 100
    for category in COMPARED:
        values = sorted(abs(by_category[category]) for by_category in errors)
        assert statistics.median(values) <= MEDIAN, category
        assert values[int(0.95 * len(values))] <= WORST, category


@pytest.mark.long
def test_nothing_fits_that_does_not(traced: list[tuple[MemoryCell, float]]) -> None:
    """With its margins, no prediction is below the traced peak: there is no capacity at which only it would fit."""
    assert {cell.name for cell, peak in traced if sum(cell.predict().values()) < peak} == set()


@pytest.mark.long
def test_lower_bounds_are_below_the_prediction() -> None:
    """The search skips layouts whose bounds exceed the capacity."""
    for cell in draw_cells():
        state = memory.bound_state(cell.recipe.model, cell.layout, cell.pass_config, cell.framework)
        passes = LowerBounds(0.0, 0.0)
        if cell.layout.pp == 1:
            passes = memory.bound_pass(cell.recipe.model, cell.layout, cell.pass_config, cell.framework)
        bound = max(map(sum, zip(state, passes, strict=True))) / memory.GIB
        assert bound <= predict_allocated(cell) * (1 + 1e-9), cell.name


def test_cells_cover_the_trainer(traced: list[tuple[MemoryCell, float]]) -> None:
    cells = [cell for cell, _ in traced]
    assert {c.layout.strategy for c in cells} >= {"single", "ddp", "zero1", "fsdp", "fsdp-grad-op", "hybrid-shard"}
    assert {c.layout.schedule for c in cells} >= {None, "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"}
    assert {c.precision for c in cells} == {"bf16", "fp16", "fp32"}
    assert {c.recipe.optim.name for c in cells} == set(get_args(OptimizerName))
    assert {c.layout.activation_checkpointing for c in cells} == {"none", "selective", "full"}
    assert (
        min(c.recipe.model.parameters() for c in cells) < 2e8 and max(c.recipe.model.parameters() for c in cells) > 4e11
    )
    assert len(cells) >= 300 and sum(c.is_held_out for c in cells) >= 40
