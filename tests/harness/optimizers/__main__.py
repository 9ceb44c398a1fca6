"""``python -m tests.harness.optimizers``: compare every optimizer under every layout with one process.

``--layout 'fsdp*'`` and ``--only muon,soap`` select cells. Writes the table to ``benchmarks/results/optimizers.json``.
Exit status: 0 if every cell is within its limit or refused with a reason, 1 otherwise, 2 if no cell matches.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import measure as benchmark
from tests.harness.optimizers.cells import CELLS, LAYOUTS, LIMITS, STEPS
from tests.harness.optimizers.measure import Outcome, run_layout

WIDTH = 100


def build_table(outcomes: Sequence[Outcome], layouts: Sequence[str], names: Sequence[str]) -> Table:
    table = Table(title=f"Largest relative deviation of the loss from one process over {STEPS} steps", width=WIDTH)
    for heading in ("layout", *names):
        table.add_column(heading, overflow="fold")
    by_cell = {(o.layout, o.optimizer): o for o in outcomes}
    for layout in layouts:
        table.add_row(layout, *(_format_cell(by_cell[layout, name]) for name in names))
    table.add_section()
    table.add_row("limit", *(f"{LIMITS[name]:.0e}" for name in names))
    return table


def _format_cell(outcome: Outcome) -> str:
    if outcome.loss is None:
        return "refused"
    return f"{outcome.loss:.0e}" if outcome.ok else f"{outcome.loss:.0e} OFF"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.optimizers", description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="*", metavar="GLOB")
    parser.add_argument("--only", default=",".join(CELLS), metavar="NAMES", help="optimizers, separated by commas")
    args = parser.parse_args()
    layouts = [name for name in LAYOUTS if fnmatch.fnmatch(name, args.layout)]
    names = [name for name in CELLS if name in args.only.split(",")]
    if not layouts or not names:
        parser.error(f"no cell matches; layouts: {', '.join(LAYOUTS)}; optimizers: {', '.join(CELLS)}")
    context = benchmark.context(("clustertrain", "torch", "pytorch-optimizer", "torchao"))
    outcomes: list[Outcome] = []
    progress, console = Console(stderr=True), Console(width=WIDTH)
    with tempfile.TemporaryDirectory(prefix="optimizers-") as folder:
        for layout in layouts:
            outcomes += run_layout(layout, names, Path(folder, layout))
            progress.print(f"{layout}: {sum(o.ok for o in outcomes if o.layout == layout)} of {len(names)} agree")
    console.print(build_table(outcomes, layouts, names))
    too_far = [o for o in outcomes if not o.ok and not o.refused]
    console.print(f"{len(outcomes) - len(too_far)} of {len(outcomes)} within their limits or refused")
    if (layouts, names) == (list(LAYOUTS), list(CELLS)):
        rows = [{**asdict(o), "limit": LIMITS[o.optimizer], "ok": o.ok} for o in outcomes]
        path = benchmark.write("optimizers", {**context, "steps": STEPS, "rows": rows})
        console.print(f"written to {path.relative_to(benchmark.ROOT)}")
    return 1 if too_far else 0


if __name__ == "__main__":
    sys.exit(main())
