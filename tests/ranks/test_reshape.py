"""Any layout resumes the checkpoint of any other: a covering subset of the reshape table (``make reshape``)."""

from __future__ import annotations

import pytest

from tests.harness.reshape.cells import LAYOUTS, SOURCES, Cell, covering, table
from tests.harness.reshape.measure import Outcome, by_ranks, sources, targets


@pytest.mark.long
def test_subset_covers_kinds_of_changes() -> None:
    cells = covering()
    assert set(cells) <= set(table())
    assert {c.source.layout for c in cells} == {c.target.layout for c in cells} == set(SOURCES)
    assert {c.target.ranks for c in cells} == {ranks for _, ranks in LAYOUTS}
    assert {c.source.layout for c in cells if c.same and c.source.precision == "fp32"} == {"ddp", "fsdp"}
    assert ("pp", "tp") in {(c.source.layout, c.target.layout) for c in cells}
    assert any(c.same and c.source.precision == "fp16" for c in cells)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Outcome]:
    """Outcomes of all cells of the subset, measured together: running ranks load a second checkpoint quickly."""
    folder = tmp_path_factory.mktemp("reshape")
    saved = sources((c.source for c in covering()), folder / "sources")
    return {o.cell: o for cells in by_ranks(covering()) for o in targets(cells, saved, folder)}


@pytest.mark.ranks
@pytest.mark.parametrize("cell", covering(), ids=lambda c: c.id)
def test_resume_under_another_layout_matches_reference(cell: Cell, outcomes: dict[Cell, Outcome]) -> None:
    assert outcomes[cell].ok, outcomes[cell]
