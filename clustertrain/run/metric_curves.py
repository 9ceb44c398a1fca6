"""Curves of a run's scalars over steps, tokens or hours, with each step once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from clustertrain import clock
from clustertrain.run import attempts, metrics, metrics_file
from clustertrain.run.run_dir import RunDir

Axis = Literal["step", "tokens", "hours"]


class Curve(msgspec.Struct, frozen=True):
    """Points in the order of their steps."""

    steps: list[int]
    """Completed optimizer steps."""
    x: list[float]
    """Positions on the axis of the comparison: steps, tokens or hours."""
    y: list[float]
    """Finite values of the metric."""

    def best_index(self, *, higher: bool) -> int | None:
        """Return the index of the best value, or of the first one if there are several."""
        if not self.y:
            return None
        return max(range(len(self.y)), key=lambda i: (self.y[i] if higher else -self.y[i], -i))

    def value_at(self, step: int) -> float | None:
        """Return the last value up to ``step``."""
        value = None
        for s, y in zip(self.steps, self.y, strict=True):
            if s > step:
                break
            value = y
        return value


class StepTable(msgspec.Struct, frozen=True):
    """Columns over the run's steps; NaN if a row has no value."""

    step: list[int]
    columns: Mapping[str, list[float]]
    """Values by name of the scalar."""
    tokens: list[float]
    """Tokens trained so far."""
    hours: list[float]
    """Time with nodes so far."""

    def curve(self, name: str, axis: Axis = "step") -> Curve:
        """Return the curve of one column, without steps that have no value, as most steps have no evaluation."""
        x: Sequence[float] = self.step if axis == "step" else self.tokens if axis == "tokens" else self.hours
        y = self.columns[name]
        indices = [i for i, v in enumerate(y) if math.isfinite(v) and math.isfinite(x[i])]
        return Curve([self.step[i] for i in indices], [float(x[i]) for i in indices], [y[i] for i in indices])


def list_scalars(run: RunDir) -> list[str]:
    """Return the scalars in the first and last rows of each attempt, in the order of their first appearance."""
    scalars: dict[str, None] = {}
    for path in (path for attempt in run.attempts() for path in run.metrics_files(attempt.n)):
        for row in (*metrics_file.read_first(path), *metrics_file.read_last(path, metrics_file.WINDOW_BYTES)):
            scalars.update(dict.fromkeys(k for k, v in row.items() if _is_number(v) and not k.startswith("sum_")))
    return [name for name in scalars if name not in ("step", "t")]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def load_step_table(run: RunDir, scalars: Sequence[str]) -> StepTable:
    """Return the rows of the run as columns; if several attempts ran a step, the row of the latest."""
    history = {a.n: a for a in attempts.load_attempts(run)}
    keys = list(dict.fromkeys(["step", "t", "sum_tokens", *scalars]))
    rows: dict[int, tuple[float, float, tuple[float, ...]]] = {}  # by step: its tokens, hours, values
    previous_s, has_tokens = 0.0, False
    for attempt in run.attempts():
        attempt_info, previous_tokens = history[attempt.n], 0.0
        start, times = attempt_info.start, []
        for path in run.metrics_files(attempt.n):  # one more after each rollback
            file_columns = metrics_file.read_columns(path, keys)
            steps = [int(s) for s in file_columns["step"] if math.isfinite(s)]
            times += list(file_columns["t"])
            start = start if start is not None else next((t for t in times if math.isfinite(t)), None)
            if not steps or start is None:
                continue
            rows = {s: v for s, v in rows.items() if s < steps[0]}
            for i, s in enumerate(file_columns["step"]):
                if not math.isfinite(s):
                    continue
                # The total runs over the attempt; a row without it adds no tokens.
                total = (
                    file_columns["sum_tokens"][i] if math.isfinite(file_columns["sum_tokens"][i]) else previous_tokens
                )
                hours = (previous_s + max(0.0, file_columns["t"][i] - start)) / 3600
                rows[int(s)] = (total - previous_tokens, hours, tuple(file_columns[name][i] for name in scalars))
                previous_tokens = total
            has_tokens = has_tokens or any(math.isfinite(t) for t in file_columns["sum_tokens"])
        if start is not None:
            previous_s += max(0.0, _find_attempt_end(attempt_info, times) - start)
    sorted_steps = sorted(rows)
    cumulative_tokens = (
        list(itertools.accumulate(rows[s][0] for s in sorted_steps)) if has_tokens else [math.nan] * len(sorted_steps)
    )
    columns = {name: [rows[s][2][i] for s in sorted_steps] for i, name in enumerate(scalars)}
    return StepTable(sorted_steps, columns, cumulative_tokens, [rows[s][1] for s in sorted_steps])


def _find_attempt_end(attempt: attempts.Attempt, times: list[float]) -> float:
    if attempt.end is not None:
        return attempt.end
    return max((t for t in times if math.isfinite(t)), default=attempt.start or 0.0)


def compute_allocated_hours(run: RunDir, *, is_running: bool) -> float:
    """Return the hours of all attempts; the last one counts until now if it ``is_running``, or until its last row."""
    total_s = 0.0
    history = attempts.load_attempts(run)
    for i, a in enumerate(history):
        if a.start is None:
            continue
        next_start = next((b.start for b in history[i + 1 :] if b.start is not None), None)
        last = (metrics.find_newest_row(run, a.n) or {}).get("t")
        end = a.end or (clock.now() if is_running and next_start is None else last) or next_start or a.start
        total_s += max(0.0, end - a.start)
    return total_s / 3600
