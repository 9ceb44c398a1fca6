"""The command ``layouts``: trace cells, and compare what the trainer refuses with what the planner refuses."""

from __future__ import annotations

import fnmatch
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console

from benchmarks import measure as benchmark
from tests.harness.fake_cluster import layout_cells
from tests.harness.fake_cluster.in_child import ChildFailed, call_in_child
from tests.harness.fake_cluster.layout_cells import LayoutCell
from tests.harness.fake_cluster.rank import trace_rank


@dataclass(frozen=True)
class Outcome:
    """Result of a cell: ``traced``, ``refused``, or what went wrong."""

    name: str
    verdict: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict in ("traced", "refused")


def check_cell(cell: LayoutCell) -> Outcome:
    """Trace the first and the last rank of ``cell``, if the planner accepts it.

    A cell that the planner refuses is reported as such and not traced.
    """
    if cell.refusal:
        return Outcome(cell.name, "refused", cell.refusal)
    short = layout_cells.shorten(cell)
    for rank in sorted({0, cell.layout.world_size - 1}):
        try:
            call_in_child(trace_rank, short, rank)
        except ChildFailed as e:
            is_config = e.error.startswith("ConfigError")
            verdict = "refused by the trainer only" if is_config else "failed"
            return Outcome(cell.name, verdict, f"rank {rank}: {e.error.splitlines()[0][:300]}")
    return Outcome(cell.name, "traced")


def run(*, everything: bool, pattern: str, limit: int | None) -> int:
    """Run the command; return the exit status."""
    cells: Iterable[LayoutCell] = layout_cells.draw_all() if everything else layout_cells.draw_covering()
    cells = itertools.islice((cell for cell in cells if fnmatch.fnmatch(cell.name, pattern)), limit)
    console, outcomes = Console(width=140), []
    for cell in cells:
        outcome = check_cell(cell)
        outcomes.append(outcome)
        if not outcome.ok:
            console.print(f"{outcome.name}: {outcome.verdict}: {outcome.detail}", markup=False)
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    console.print(f"{len(outcomes)} cells: {', '.join(f'{n} {verdict}' for verdict, n in verdicts.items())}")
    if pattern == "*" and limit is None:
        rows = [{"cell": o.name, "verdict": o.verdict, "detail": o.detail} for o in outcomes]
        context = benchmark.context(("clustertrain", "torch"))
        path = benchmark.write("fake_cluster", {**context, "everything": everything, "rows": rows})
        console.print(f"written to {path.relative_to(benchmark.ROOT)}")
    return 0 if outcomes and all(outcome.ok for outcome in outcomes) else 1
