"""Tables that drop columns in a narrow terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from clustertrain.report import terminal
from clustertrain.report.tables import Column, fit_table

COLUMNS = [
    Column("run", ["a-run-of-some-length-abcdef", "b-bbbbbb"]),
    Column("at step", ["12", "3"], right_aligned=True),
    Column("state", [Text("completed"), Text("lost")]),
    Column("started", ["01-15 08:00:00"] * 2),
]


@pytest.mark.parametrize(
    ("width", "titles", "wrapped"),
    [
        (63, ["run", "at step", "state", "started"], False),
        (62, ["run", "at step", "state", "started"], True),
        (60, ["run", "at step", "state", "started"], True),
        (59, ["run", "at step", "state"], False),
        (44, ["run", "at step", "state"], True),
        (43, ["run", "at step"], False),
        (20, ["run", "at step"], True),
    ],
)
def test_narrow_table_wraps_titles_then_drops_columns(width: int, titles: list[str], wrapped: bool) -> None:
    table = fit_table(COLUMNS, width, drop_order=("started", "state"))
    assert [column.header for column in table.columns] == titles
    out = io.StringIO()
    terminal.emit(Console(file=out, width=width), table)
    *head, first, second = out.getvalue().splitlines()
    assert len(head) == 1 + wrapped
    shown = [str(column.cells[0]) for column in COLUMNS if column.title in titles]
    assert first.split(maxsplit=len(titles) - 1) == shown and second.startswith("b-bbbbbb ")


def test_table_without_rows() -> None:
    assert fit_table([Column("run", []), Column("at step", [])], 80).row_count == 0
