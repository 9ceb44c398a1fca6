"""What one layout saves any other loads and goes on with: a covering subset of the reshape table (``make reshape``)."""

from __future__ import annotations

import pytest

from tests.harness.reshape.cells import LAYOUTS, SOURCES, Cell, covering, table
from tests.harness.reshape.measure import Outcome, by_ranks, sources, targets


def test_ci_subset_covers_what_a_change_may_break() -> None:
    cells = covering()
    assert set(cells) <= set(table())
    assert {c.source.layout for c in cells} == {c.target.layout for c in cells} == set(SOURCES)
    assert {c.target.ranks for c in cells} == {ranks for _, ranks in LAYOUTS}
    assert {c.source.layout for c in cells if c.same and c.source.precision == "fp32"} == {"ddp", "fsdp"}
    assert ("pp", "tp") in {(c.source.layout, c.target.layout) for c in cells}
    assert any(c.same and c.source.precision == "fp16" for c in cells)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Outcome]:
    """All cells of the subset at once, since ranks that are there already load a second one in little time."""
    folder = tmp_path_factory.mktemp("reshape")
    saved = sources((c.source for c in covering()), folder / "sources")
    return {o.cell: o for cells in by_ranks(covering()) for o in targets(cells, saved, folder)}


@pytest.mark.ranks
@pytest.mark.parametrize("cell", covering(), ids=lambda c: c.id)
def test_run_continues_as_if_uninterrupted(cell: Cell, outcomes: dict[Cell, Outcome]) -> None:
    assert outcomes[cell].ok, outcomes[cell]
