"""Every layout trains like one process: a covering subset of the parity table (``make parity``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.parity.cells import FEW_STEPS, LAYOUTS, STEPS, Cell, covering, pairs, table
from tests.harness.parity.measure import run


@pytest.mark.long
def test_subset_covers_layouts_and_pairs_of_factors() -> None:
    assert {c.layout for c in covering() if c.precision == "fp32"} == set(LAYOUTS)
    assert pairs(covering()) == pairs(table())


@pytest.mark.ranks
@pytest.mark.parametrize("cell", covering(), ids=lambda c: c.id)
def test_losses_and_norms_match_one_process(cell: Cell, tmp_path: Path) -> None:
    # A wrong gradient shows in the first steps. Those of fp16 may be skipped.
    outcome = run(cell, tmp_path / "cell", STEPS if cell.precision == "fp16" and not cell.slow else FEW_STEPS)
    assert outcome.ok, outcome
