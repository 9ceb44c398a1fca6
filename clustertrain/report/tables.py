"""Tables that drop whole columns in a narrow terminal, so that no cell that a user copies is truncated."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

COLUMN_GAP = 2  # blanks


class Column(msgspec.Struct, frozen=True):
    """A title and its cells."""

    title: str
    cells: Sequence[str | Text]
    right_aligned: bool = False

    def width(self, *, wrapped: bool) -> int:
        """Return the width in cells; ``wrapped`` puts each word of the title on its own line."""
        titles = self.title.split() if wrapped else [self.title]
        return max(cell_len(str(text)) for text in (*titles, *self.cells, ""))


def fit_table(columns: Sequence[Column], width: int, drop_order: Sequence[str] = ()) -> Table:
    """Return a table of the ``columns`` that fit into ``width``.

    Columns are dropped by title in ``drop_order`` until the rest fits. The rest is never truncated; if it is still too
    wide, the terminal wraps the lines.
    """
    remaining = list(columns)
    for title in drop_order:
        if _width(remaining, wrapped=True) <= width:
            break
        remaining = [column for column in remaining if column.title != title]
    wrapped = _width(remaining, wrapped=False) > width
    table = Table(
        box=None,
        padding=(0, COLUMN_GAP, 0, 0),
        pad_edge=False,
        header_style="bold",
        width=_width(remaining, wrapped=wrapped),
    )
    for column in remaining:
        table.add_column(
            column.title, justify="right" if column.right_aligned else "left", width=column.width(wrapped=wrapped)
        )
    for row in zip(*(column.cells for column in remaining), strict=True):
        table.add_row(*row)
    return table


def _width(columns: Sequence[Column], *, wrapped: bool) -> int:
    return sum(column.width(wrapped=wrapped) + COLUMN_GAP for column in columns) - COLUMN_GAP
