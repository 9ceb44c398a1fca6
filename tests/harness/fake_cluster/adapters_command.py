"""The command ``adapters``: predicted and traced peaks of fine-tunes with adapters, and their JSON."""

from __future__ import annotations

import fnmatch
from typing import Any

from rich.console import Console

from benchmarks import measure as benchmark
from tests.harness.fake_cluster.adapter_cells import list_cells
from tests.harness.fake_cluster.in_child import ChildFailed
from tests.harness.fake_cluster.measure_memory import measure_cell
from tests.harness.fake_cluster.memory_command import GIB, Row, summarize

GOAL = 0.05  # largest error of a prediction


def run(*, pattern: str, limit: int | None) -> int:
    """Run the command; return the exit status."""
    cells = [(kind, cell) for kind, cell in list_cells() if fnmatch.fnmatch(f"{kind}: {cell.name}", pattern)][:limit]
    console, rows, failures = Console(width=140), list[tuple[str, Row]](), 0
    for kind, cell in cells:
        try:
            row = Row(cell, cell.predict(), {name: n / GIB for name, n in measure_cell(cell).at_peak.items()})
        except ChildFailed as e:
            failures += 1
            console.print(f"{kind}: {cell.name}: {e.error}", markup=False)
            continue
        rows.append((kind, row))
        console.print(
            f"{row.ratio:.3f} = {row.predicted_gib:.2f} / {row.traced_gib:.2f} GiB  {kind}: {cell.name}", markup=False
        )
        if pattern == "*" and limit is None:
            _write(rows)
    far = [row for _, row in rows if abs(row.ratio - 1) > GOAL]
    return 1 if far or failures or not rows else 0


def _write(rows: list[tuple[str, Row]]) -> None:
    """Write what has been measured so far."""
    kinds: dict[str, list[float]] = {}
    table: list[dict[str, Any]] = []
    for kind, row in rows:
        kinds.setdefault(kind, []).append(row.ratio)
        table.append({
            "fine_tune": kind,
            "cell": row.cell.name,
            "layers": row.cell.recipe.model.layers,
            "predicted_gib": {k: round(n, 3) for k, n in row.predicted.items()},
            "traced_gib": {k: round(n, 3) for k, n in row.traced.items()},
            "ratio": round(row.ratio, 4),
        })  # fmt: skip
    summary = {kind: summarize(ratios) for kind, ratios in kinds.items()}
    benchmark.write(
        "fake_memory_adapters", {**benchmark.context(("clustertrain", "torch")), "summary": summary, "rows": table}
    )
