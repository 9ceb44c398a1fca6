"""``python -m tests.harness.parity``: compare every layout with one process, step by step.

``--only 'tp*'`` selects cells by id; ``--floor`` measures the reference against itself. Writes the table to
``benchmarks/results/parity.json``.
Exit status: 0 if every cell is within its limit, 1 otherwise, 2 if no cell matches.
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
from tests.harness.parity import reference
from tests.harness.parity.cells import LAYOUTS, OPTIMIZERS, PRECISIONS, Cell, covering, table
from tests.harness.parity.measure import Outcome, one_thread, run

WIDTH = 80


def format_deviation(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def build_table(outcomes: Sequence[Outcome]) -> Table:
    cells_table = Table(title="Largest relative deviation from one process over 20 steps", width=WIDTH, padding=(0, 0))
    for name in ("layout", "format", "mb", "ckpt", "opt", "rk", "s", "loss", "norm", "limits", ""):
        cells_table.add_column(name, justify="left" if name in ("layout", "format", "ckpt", "opt", "") else "right")
    for o in outcomes:
        c = o.cell
        limits = f"{c.limit.loss:.0e} {c.limit.norm:.0e}"
        row = (
            c.layout + " docs" * c.documents,
            c.precision,
            c.micro_batches,
            c.checkpointing[:4],
            c.optimizer,
            c.shape.world_size,
        )
        cells_table.add_row(
            *map(str, row), f"{o.seconds:.1f}", format_deviation(o.loss), format_deviation(o.norm), limits, o.verdict
        )
    return cells_table


def build_summary(outcomes: Sequence[Outcome]) -> Table:
    """Return a table of the largest deviations of loss and norm, by layout and precision."""
    summary = Table(title="Largest deviation by layout: loss, norm", width=WIDTH, padding=(0, 1))
    summary.add_column("layout")
    for precision in PRECISIONS:
        summary.add_column(precision)
    for layout in LAYOUTS:
        of_layout = [o for o in outcomes if o.cell.layout == layout]
        if of_layout:
            summary.add_row(layout, *(_worst([o for o in of_layout if o.cell.precision == p]) for p in PRECISIONS))
    return summary


def _worst(outcomes: Sequence[Outcome]) -> str:
    measured = [(o.loss, o.norm) for o in outcomes if o.loss is not None and o.norm is not None]
    if not outcomes:
        return ""
    failed = len(outcomes) - len(measured)
    deviations = f"{max(m[0] for m in measured):.1e}  {max(m[1] for m in measured):.1e}" if measured else ""
    return f"{deviations} {failed} failed".strip() if failed else deviations


def floors() -> Table:
    """Return a table of the reference's deviation from itself, by policy and optimizer setting.

    For fp16 it is the largest over all sets of skipped steps in ``reference.SKIPS``.
    """
    floor_table = Table(title="The reference from itself: loss, norm", width=WIDTH, padding=(0, 1))
    floor_table.add_column("policy")
    for setting in OPTIMIZERS:
        floor_table.add_column(setting)
    with one_thread():
        for policy in ("fp32", "bf16-autocast", "bf16-cast", "fp16-autocast", "fp16-cast"):
            skips = reference.SKIPS if policy.startswith("fp16") else reference.SKIPS[:1]
            cells = []
            for setting in OPTIMIZERS:
                of_setting = [reference.floor(policy, setting, skipped) for skipped in skips]
                cells.append("  ".join(format_deviation(max(side)) for side in zip(*of_setting, strict=True)))
            floor_table.add_row(policy, *cells)
    return floor_table


def as_json(o: Outcome) -> dict[str, Any]:
    return {
        **asdict(o.cell),
        "ranks": o.cell.shape.world_size,
        "policy": o.cell.policy,
        "seconds": round(o.seconds, 2),
        "loss_deviation": o.loss,
        "norm_deviation": o.norm,
        "limits": asdict(o.cell.limit),
        "skipped_steps": o.skipped,
        "failure": o.failure,
        "ok": o.ok,
    }


def measured(cells: Sequence[Cell], progress: Console) -> list[Outcome]:
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        for i, cell in enumerate(cells):
            o = run(cell, Path(folder, str(i)))
            outcomes.append(o)
            result = (
                o.failure.splitlines()[0]
                if o.failure
                else f"loss {format_deviation(o.loss)} norm {format_deviation(o.norm)}"
            )
            line = f"{i + 1}/{len(cells)} {cell.id} {o.seconds:.1f} s: {o.verdict} {result}"
            progress.print(line, markup=False, highlight=False, soft_wrap=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.parity", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", metavar="GLOB", help="layout/precision/micro-batches/ckpt/optimizer")
    parser.add_argument("--covering", action="store_true", help="the subset that the tests run")
    parser.add_argument(
        "--floor", action="store_true", help="compare the reference with itself, without ranks: no limit can be tighter"
    )
    args = parser.parse_args()
    if args.floor:
        Console(width=WIDTH).print(floors())
        return 0
    all_cells = covering() if args.covering else table()
    cells = [c for c in all_cells if fnmatch.fnmatch(c.id, args.only)]
    if not cells:
        parser.error(f"no cell matches {args.only!r}; the first is {all_cells[0].id}")
    context = benchmark.context(("clustertrain", "torch", "numpy"))
    outcomes = measured(cells, Console(stderr=True))
    console = Console(width=WIDTH)
    console.print(build_table(outcomes), build_summary(outcomes))
    outside = [o for o in outcomes if not o.ok]
    console.print(f"{len(outcomes) - len(outside)} of {len(outcomes)} cells within their limits")
    if cells == table():
        path = benchmark.write("parity", {**context, "rows": [as_json(o) for o in outcomes]})
        console.print(f"written to {path.relative_to(benchmark.ROOT)}")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
