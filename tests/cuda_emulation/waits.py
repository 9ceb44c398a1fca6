"""Write docs/reference/cuda-waits.md: how often the host waits for the GPU in a step, by layout (make cuda-waits)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from clustertrain import fsio
from tests.cuda_emulation import own_processes, sync_budget
from tests.cuda_emulation.build import CannotEmulate
from tests.cuda_emulation.layouts import CASES
from tests.cuda_emulation.sync_budget import Wait
from tests.paths import DEVICE_VARIABLE, ROOT

PAGE = ROOT / "docs" / "reference" / "cuda-waits.md"
BEGIN, END = "<!-- begin: written by make cuda-waits -->", "<!-- end of make cuda-waits -->"


def format_table(waits: Mapping[str, Mapping[Wait, float]]) -> list[str]:
    """Return the table of the page.

    Args:
        waits: by case, the most that a rank waited.
    """
    lines = ["| layouts | waits per step |", "|---|---|"]
    layouts: dict[str, list[str]] = {}
    for name, counts in waits.items():
        text = "<br>".join(f"{n:g} {what} in `{place}`" for (what, place), n in sorted(counts.items()))
        layouts.setdefault(text, []).append(name)
    return lines + [f"| {', '.join(names)} | {text} |" for text, names in layouts.items()]


def format_reasons() -> list[str]:
    """Return the table of the waits that are allowed."""
    lines = ["| wait | in | why |", "|---|---|---|"]
    return lines + [f"| {what} | `{place}` | {reason} |" for (what, place), reason in sync_budget.REASONS.items()]


def main() -> int:
    os.environ[DEVICE_VARIABLE] = "cuda"
    try:
        os.environ.update(own_processes.environment())
    except CannotEmulate as e:
        print(f"cannot count waits: {e}", file=sys.stderr)
        return 1
    from tests.cuda_emulation.traced_run import traced_run  # reads the variable

    waits: dict[str, dict[Wait, float]] = {}
    for name in CASES:
        ranks = traced_run(name).waits_per_step().values()
        waits[name] = max(ranks, key=lambda counts: sum(counts.values()))
        print(f"{name}: {sum(waits[name].values()):g} waits per step", file=sys.stderr, flush=True)
        traced_run.cache_clear()
    text = PAGE.read_text()
    head, rest = text.split(BEGIN, 1)
    parts = [head + BEGIN, "", *format_table(waits), "", *format_reasons(), "", END]
    fsio.write_text(PAGE, "\n".join(parts) + rest.split(END, 1)[1], mode=0o644)
    excess = {name: sync_budget.excess(name, counts) for name, counts in waits.items()}
    for name, counts in excess.items():
        if counts:
            print(f"{name}: not in the budget: {counts}", file=sys.stderr)
    return 1 if any(excess.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
