"""``python -m tests.harness.reshape``: save under each layout and load under every other.

``--only 'pp-*/tp-*'`` selects cells by id. Writes the table to ``benchmarks/results/reshape.json``.
Exit status: 0 if every loaded value equals the saved one, 1 otherwise, 2 if no cell matches.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure as benchmark
from tests.harness.reshape.cells import LAYOUTS, LIMITS, SOURCE_RANKS, SOURCES, Cell, Source, Target, table
from tests.harness.reshape.measure import Outcome, by_target, sources, targets

WIDTH = 80


def build_table(outcomes: Sequence[Outcome]) -> Table:
    table_of_cells = Table(
        title=f"Saved by {SOURCE_RANKS} ranks and loaded: largest deviation of the next five losses",
        width=WIDTH,
        padding=(0, 0),
    )
    table_of_cells.add_column("")
    for source in SOURCES:
        table_of_cells.add_column(source, justify="right")
    by_cell = {o.cell: o for o in outcomes}
    for precision in LIMITS:
        for name, ranks in LAYOUTS:
            cells = [Cell(Source(s, precision), Target(name, ranks)) for s in SOURCES]
            if any(c in by_cell for c in cells):
                formatted = [_format_outcome(by_cell.get(c)) for c in cells]
                table_of_cells.add_row(f"{name} {ranks}" + (f" {precision}" if precision != "fp32" else ""), *formatted)
    return table_of_cells


def _format_outcome(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if not outcome.ok or outcome.loss is None:
        return "FAILED"
    return f"{outcome.loss:.0e}" if outcome.loss else "equal"


def as_json(o: Outcome) -> dict[str, Any]:
    return {
        "source": {**asdict(o.cell.source), "ranks": SOURCE_RANKS},
        "target": asdict(o.cell.target),
        "loss_deviation": o.loss,
        "limit": o.cell.limit,
        "failure": o.failure,
        "ok": o.ok,
    }


def run_cells(cells: Sequence[Cell], progress: Console) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="reshape-") as folder:
        saved = sources((c.source for c in cells), Path(folder, "sources"))
        for group in by_target(cells):
            for o in targets(group, saved, Path(folder)):
                outcomes.append(o)
                line = f"{len(outcomes)}/{len(cells)} {o.cell.id}: {o.failure or _format_outcome(o)}"
                progress.print(line, markup=False, highlight=False, soft_wrap=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.reshape", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", metavar="GLOB", help="source-precision/target-ranks")
    args = parser.parse_args()
    cells = [c for c in table() if fnmatch.fnmatch(c.id, args.only)]
    if not cells:
        parser.error(f"no cell matches {args.only!r}; the first is {table()[0].id}")
    context = benchmark.context(("clustertrain", "torch", "numpy"))
    outcomes = run_cells(cells, Console(stderr=True))
    console = Console(width=WIDTH)
    console.print(build_table(outcomes))
    failed = [o for o in outcomes if not o.ok]
    console.print(
        f"{len(outcomes) - len(failed)} of {len(outcomes)} cells restored the saved state and continue like the source"
    )
    if cells == table():
        path = benchmark.write("reshape", {**context, "rows": [as_json(o) for o in outcomes]})
        console.print(f"written to {path.relative_to(benchmark.ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
