"""Training scalars: one JSON line per logged step in ``metrics/attempt-<n>.jsonl``, merged by step on reading.

An attempt that returns to an earlier step starts another file, ``attempt-<n>-<k>.jsonl``: within a file steps rise.

Keys: ``step`` (optimizer steps done), ``t`` (UTC epoch s, when the step ended), and any of ``loss``, ``lr``,
``grad_norm`` (before clipping), ``clipped`` (0 or 1), ``clip_fraction`` (of the last 100 steps), ``skipped`` and
``spike`` (1, where it was), ``step_s`` (without evaluation and checkpoints), ``tokens_per_s`` or, where there are no
tokens, ``samples_per_s`` (of all ranks), ``data_wait_s`` (of rank 0), ``allocated_gib`` (of rank 0's GPU) and what the
user logs; ``evaluation`` is "cut short" where a stop has cut it short: the next attempt makes up for it and tells the
row once more; every ``log_every`` steps ``peak_allocated_gib`` of rank 0, on a CPU ``rss_gib`` instead. Every
``stability.layer_stats_every`` steps columns ``grad_norm/UNIT``, ``weight_norm/UNIT``, ``update_ratio/UNIT``,
``activation/UNIT`` and ``dead/MODULE``. ``bad_samples``: in words, those of a step that was skipped or is a spike.

``sum_skipped`` is how many steps of the run were skipped, where there are any. ``sum_step_s``, ``sum_tokens`` and
``sum_data_wait_s`` are running totals over the attempt, this row included: two rows tell what lies between them, so
that nobody has to add up a million.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clustertrain import fsio
from clustertrain.run import metrics_file
from clustertrain.run.metrics_file import Row
from clustertrain.run.run_dir import RunDir

CUT_SHORT = {"evaluation": "cut short"}  # in the row of the evaluation's step


def load_rows(run: RunDir) -> list[Row]:
    """Return all rows by step. A step that ran several times counts once, with its last run."""
    by_step: dict[int, Row] = {}
    for attempt in run.attempts():
        for path in run.metrics_files(attempt.n):
            rows = [r for r in fsio.read_jsonl(path) if "step" in r]
            if rows:
                first = int(rows[0]["step"])
                by_step = {s: r for s, r in by_step.items() if s < first}
                by_step.update({int(r["step"]): {**r, "attempt": attempt.n} for r in rows})
    return [by_step[s] for s in sorted(by_step)]


def is_cut_short(row: Mapping[str, object]) -> bool:
    """Return whether a stop cut the evaluation of this row short, so that the next attempt writes the row again."""
    return CUT_SHORT.items() <= row.items()


def read_last_row(path: Path) -> Row | None:
    """Return the newest row of a file, of which only the end is read."""
    rows = metrics_file.read_last(path)
    return rows[-1] if rows else None


def find_newest_row(run: RunDir, attempt: int) -> Row | None:
    """Return the newest row of one attempt."""
    rows = (read_last_row(path) for path in reversed(run.metrics_files(attempt)))
    return next((row for row in rows if row), None)


def find_latest_row(run: RunDir) -> Row | None:
    """Return the newest row of the newest attempt that has one."""
    for attempt in reversed(run.attempts()):
        row = find_newest_row(run, attempt.n)
        if row:
            return {**row, "attempt": attempt.n}
    return None
