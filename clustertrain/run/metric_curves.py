"""A run's scalars as curves: each step once over all attempts, against steps, tokens or hours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from clustertrain import clock
from clustertrain.run import attempts, metrics, metrics_file
from clustertrain.run.run_dir import RunDir

Axis = Literal["step", "tokens", "hours"]


class Curve(msgspec.Struct, frozen=True):
    """Points in the order of their steps; ``y`` is finite, ``steps`` are optimizer steps done."""

    steps: list[int]
    x: list[float]
    y: list[float]

    def best(self, *, higher: bool) -> int | None:
        """Index of the best value, the first one of several."""
        if not self.y:
            return None
        return max(range(len(self.y)), key=lambda i: (self.y[i] if higher else -self.y[i], -i))

    def at(self, step: int) -> float | None:
        """The last value by that step."""
        found = None
        for s, y in zip(self.steps, self.y, strict=True):
            if s > step:
                break
            found = y
        return found


class Steps(msgspec.Struct, frozen=True):
    """Columns over the run's steps; nan where a row has none. ``hours`` are those in which the run had nodes."""

    step: list[int]
    columns: Mapping[str, list[float]]
    tokens: list[float]
    hours: list[float]

    def curve(self, name: str, axis: Axis = "step") -> Curve:
        """Without the steps that have no such value, as most have none of an evaluation."""
        x: Sequence[float] = self.step if axis == "step" else self.tokens if axis == "tokens" else self.hours
        y = self.columns[name]
        kept = [i for i, v in enumerate(y) if math.isfinite(v) and math.isfinite(x[i])]
        return Curve([self.step[i] for i in kept], [float(x[i]) for i in kept], [y[i] for i in kept])


def names(run: RunDir) -> list[str]:
    """Of the scalars in the first and last rows of each attempt, in the order of their first appearance."""
    found: dict[str, None] = {}
    for path in (path for attempt in run.attempts() for path in run.metrics_files(attempt.n)):
        for row in (*metrics_file.first(path), *metrics_file.last(path, metrics_file.WINDOW)):
            found.update(dict.fromkeys(k for k, v in row.items() if _is_number(v) and not k.startswith("sum_")))
    return [name for name in found if name not in ("step", "t")]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read(run: RunDir, wanted: Sequence[str]) -> Steps:
    """The rows of :func:`clustertrain.run.metrics.read`, as columns: of a step that several attempts ran the latest
    one's."""
    history = {a.n: a for a in attempts.read_all(run)}
    keys = list(dict.fromkeys(["step", "t", "sum_tokens", *wanted]))
    kept: dict[int, tuple[float, float, tuple[float, ...]]] = {}  # by step: tokens of it, hours, values
    before_s, counted = 0.0, False
    for attempt in run.attempts():
        seen, sum_before = history[attempt.n], 0.0
        start, times = seen.start, []
        for path in run.metrics_files(attempt.n):  # a further one for each time that the attempt went back
            found = metrics_file.columns(path, keys)
            whole = [int(s) for s in found["step"] if math.isfinite(s)]
            times += list(found["t"])
            start = start if start is not None else next((t for t in times if math.isfinite(t)), None)
            if not whole or start is None:
                continue
            kept = {s: v for s, v in kept.items() if s < whole[0]}
            for i, s in enumerate(found["step"]):
                if not math.isfinite(s):
                    continue
                # The running total goes on in the attempt; a row that has none counts nothing.
                total = found["sum_tokens"][i] if math.isfinite(found["sum_tokens"][i]) else sum_before
                hours = (before_s + max(0.0, found["t"][i] - start)) / 3600
                kept[int(s)] = (total - sum_before, hours, tuple(found[name][i] for name in wanted))
                sum_before = total
            counted = counted or any(math.isfinite(t) for t in found["sum_tokens"])
        if start is not None:
            before_s += max(0.0, _end(seen, times) - start)
    order = sorted(kept)
    cumulated = list(itertools.accumulate(kept[s][0] for s in order)) if counted else [math.nan] * len(order)
    columns = {name: [kept[s][2][i] for s in order] for i, name in enumerate(wanted)}
    return Steps(order, columns, cumulated, [kept[s][1] for s in order])


def _end(seen: attempts.Attempt, times: list[float]) -> float:
    if seen.end is not None:
        return seen.end
    return max((t for t in times if math.isfinite(t)), default=seen.start or 0.0)


def hours_with_nodes(run: RunDir, *, running: bool) -> float:
    """Over all attempts; of the last one until now while it is ``running``, else until its last word."""
    found = 0.0
    history = attempts.read_all(run)
    for i, a in enumerate(history):
        if a.start is None:
            continue
        later = next((b.start for b in history[i + 1 :] if b.start is not None), None)
        last = (metrics.newest_row(run, a.n) or {}).get("t")
        end = a.end or (clock.now() if running and later is None else last) or later or a.start
        found += max(0.0, end - a.start)
    return found / 3600
