"""Training scalars: one JSON line per logged step in ``metrics/attempt-<n>.jsonl``, merged by step on reading.

An attempt that returns to an earlier step starts another file, ``attempt-<n>-<k>.jsonl``, so steps rise within a file.

Each row has ``step`` (completed optimizer steps) and ``t`` (end of the step, UTC epoch s). Other keys are optional:

- ``loss``, ``lr``, and the scalars that the user logs
- ``grad_norm`` (before clipping), ``clipped`` (0 or 1), ``clip_fraction`` (of the last 100 steps)
- ``noise_scale``: gradient noise scale in samples, every ``stability.noise_scale_every`` steps
- ``generalization_gap``, in the row of an evaluation: validation loss minus the step's training loss
- ``skipped``, ``spike``: 1 if the step was skipped or is a spike; ``bad_samples``: a description of its samples
- ``step_s``: without evaluation and checkpoints
- ``tokens_per_s``, or ``samples_per_s`` for data without tokens: of all ranks
- ``data_wait_s``: of rank 0
- ``allocated_gib``: of rank 0's GPU; every ``log_every`` steps also ``peak_allocated_gib``, or ``rss_gib`` on a CPU
- ``evaluation``: "cut short" if a stop ended the evaluation early; the next attempt repeats it and writes the row again
- every ``stability.layer_stats_every`` steps ``grad_norm/UNIT``, ``weight_norm/UNIT``, ``update_ratio/UNIT``,
  ``activation/UNIT``, ``dead/MODULE`` and ``saturated/MODULE``
- ``sum_skipped``: skipped steps of the run so far, if there are any
- ``sum_step_s``, ``sum_tokens``, ``sum_data_wait_s``: running totals over the attempt including this row. The total of
  a range of steps is therefore the difference of two rows.
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
