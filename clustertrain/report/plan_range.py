"""Text output of ``plan --gpus-range``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from clustertrain.plan.layout import pluralize
from clustertrain.report.documents.plans import PlanOfSize
from clustertrain.report.terminal import emit, make_console


def print_table(rows: Sequence[PlanOfSize], global_batch: int, gpus_per_node: int) -> None:
    """Print one line per number of GPUs."""
    table = Table.grid(padding=(0, 2))
    for justify in ("right", "left", "right", "right", "right", "right"):
        table.add_column(justify=justify, overflow="fold")
    table.add_row("GPUs", "layout", "s/step", "tokens/s", "efficiency", "GiB per rank")
    for row in rows:
        table.add_row(
            str(row.gpus),
            (row.layout or "") + (f" ({row.reason})" if row.reason else ""),
            _format_number(row.step_s, ".3g"),
            _format_number(row.tokens_per_s, ",.0f"),
            _format_number(row.efficiency, ".0%"),
            _format_number(row.peak_gib, ".1f") + ("" if row.fits is not False else ", DOES NOT FIT"),
        )
    size = f"{pluralize(gpus_per_node, 'GPU')} per node, global batch {global_batch:,}"
    title = f"{size}; efficiency relative to the first row"
    emit(make_console(), title, table)


def _format_number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
