"""Training scalars: one JSON line a logged step in ``metrics/attempt-<n>.jsonl``, merged by step on reading.

Keys: ``step`` (optimizer steps done), ``t`` (UTC epoch s), and any of ``loss``, ``lr``, ``grad_norm``, ``step_s``,
``tokens_per_s``, ``data_wait_s`` and what the user logs; every ``log_every`` steps on a GPU ``peak_allocated_gib`` of
rank 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertrain import fsio
from clustertrain.run.folder import RunDir


def read(run: RunDir) -> list[dict[str, Any]]:
    """All rows by step. A step that several attempts ran counts once, as the latest attempt ran it."""
    by_step: dict[int, dict[str, Any]] = {}
    for attempt in run.attempts():
        rows = [r for r in fsio.read_lines(run.metrics_of(attempt.n)) if "step" in r]
        if rows:
            first = int(rows[0]["step"])
            by_step = {s: r for s, r in by_step.items() if s < first}
            by_step.update({int(r["step"]): {**r, "attempt": attempt.n} for r in rows})
    return [by_step[s] for s in sorted(by_step)]


def last_rows(path: Path, size: int = 4096) -> list[dict[str, Any]]:
    """The rows in the last ``size`` bytes of one attempt's file."""
    return [row for row in fsio.last_lines(path, size) if "step" in row]


def last_row(path: Path) -> dict[str, Any] | None:
    """The newest row of one attempt's file; reads only the file's end."""
    rows = last_rows(path)
    return rows[-1] if rows else None


def latest(run: RunDir) -> dict[str, Any] | None:
    """The newest row of the newest attempt that has one."""
    for attempt in reversed(run.attempts()):
        row = last_row(run.metrics_of(attempt.n))
        if row:
            return {**row, "attempt": attempt.n}
    return None
