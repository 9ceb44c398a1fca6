"""The line that is printed for a row of metrics: what people look for first, in at most 100 columns."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from clustertrain.config.evaluation import VALIDATION_PREFIX
from clustertrain.durations import format_duration, format_step_time
from clustertrain.train.stability.warnings import BAD_SAMPLES_KEY

WIDTH = 100
PART_SEPARATOR = "/"  # before the name of a layer or slice in a column name
TOTAL_PREFIX = "sum_"  # prefix of running totals
RATE_ROWS = 10  # printed rows over which the rate of steps is averaged
MAX_DATA_WAIT = 0.05  # of the time of a step; less is not printed
# Printed in a form of their own, or only in the file.
_OWN_FORM = frozenset(
    {
        "t", "step", "loss", "lr", "grad_norm", "step_s", "tokens_per_s", "samples_per_s", "data_wait_s", "rss_gib",
        "allocated_gib", "peak_allocated_gib", "clipped", "clip_fraction", "skipped", "spike", "overflow",
        BAD_SAMPLES_KEY,
    }
)  # fmt: skip


class RowLine:
    """Formatter of the printed rows of one loop of steps."""

    def __init__(self) -> None:
        self._total: int | None = None
        self._printed: deque[tuple[float, int]] = deque(maxlen=RATE_ROWS)
        self._previous: Mapping[str, Any] = {}  # the last printed row

    def begin(self, total_steps: int | None) -> None:
        """Begin a loop of steps up to ``total_steps`` of the whole run. Its rate is that of this loop alone."""
        self._total = total_steps
        self._printed.clear()
        self._previous = {}

    def format(self, row: Mapping[str, Any]) -> str:
        """Return the line of ``row``, without the values that do not fit: the file of metrics has them all."""
        line = ""
        for item in self._items(row):
            extended = f"{line}  {item}" if line else item
            if len(extended) <= WIDTH:
                line = extended
        self._previous = dict(row)
        return line

    def _items(self, row: Mapping[str, Any]) -> Iterator[str]:
        """Yield the parts of the line, the most important one first."""
        if (t := _as_number(row.get("t"))) is not None:
            yield time.strftime("%H:%M:%S", time.localtime(t))
        total = "" if self._total is None else f"/{self._total}"
        yield f"step {row['step']:>{max(0, len(total) - 1)}}{total}"
        if "loss" in row:
            yield f"loss {_format_value(row['loss'])}"
        left_s = self._estimate_left(t, int(row["step"]))
        if left_s is not None:
            yield f"{format_duration(left_s)} left"
        yield from (name for name in ("skipped", "spike", "overflow") if row.get(name))
        yield from (str(row[k]) for k in (BAD_SAMPLES_KEY,) if k in row)
        others = {k: v for k, v in row.items() if k not in _OWN_FORM and not k.startswith(TOTAL_PREFIX)}
        others = {k: v for k, v in others.items() if PART_SEPARATOR not in k}
        yield from (f"{k} {_format_value(v)}" for k, v in others.items() if k.startswith(VALIDATION_PREFIX))
        yield from _format_speed({**row, **self._mean_speed(row)})
        yield from (f"{k} {_format_value(row[k], 3)}" for k in ("lr", "grad_norm") if k in row)
        yield from (f"{k} {_format_value(v)}" for k, v in others.items() if not k.startswith(VALIDATION_PREFIX))
        for name in ("peak_allocated_gib", "rss_gib"):
            if (gib := _as_number(row.get(name))) is not None:
                yield f"{gib:.3g} GiB"

    def _estimate_left(self, t: float | None, step: int) -> float | None:
        """Return the time for the remaining steps at the rate of the last printed rows, with all that is between."""
        if t is None or self._total is None:
            return None
        if self._printed and step <= self._printed[-1][1]:
            self._printed.clear()  # after a rollback
        self._printed.append((t, step))
        (first_t, first_step), remaining = self._printed[0], self._total - step
        return None if first_step == step or remaining <= 0 else (t - first_t) / (step - first_step) * remaining

    def _mean_speed(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the speed over the steps since the last printed row; a single step may be far from typical."""
        names = ("step", "sum_step_s", "sum_tokens", "sum_data_wait_s")
        steps, seconds, tokens, wait_s = (self._increase(row, name) for name in names)
        if not steps or not seconds:
            return {}
        mean = {"step_s": seconds / steps}
        if tokens is not None:
            mean["tokens_per_s"] = tokens / seconds
        if wait_s is not None:
            mean["data_wait_s"] = wait_s / steps
        samples_per_s, step_s = _as_number(row.get("samples_per_s")), _as_number(row.get("step_s"))
        if samples_per_s is not None and step_s is not None:
            mean["samples_per_s"] = samples_per_s * step_s / mean["step_s"]
        return mean

    def _increase(self, row: Mapping[str, Any], name: str) -> float | None:
        """Return by how much a total has grown since the last printed row; None if that is unknown or negative."""
        before, now = _as_number(self._previous.get(name)), _as_number(row.get(name))
        return now - before if before is not None and now is not None and now >= before else None


def _format_speed(row: Mapping[str, Any]) -> Iterator[str]:
    step_s = _as_number(row.get("step_s"))
    if step_s is not None:
        yield f"{format_step_time(step_s)}/step"
    wait_s = _as_number(row.get("data_wait_s"))
    if step_s and wait_s is not None and wait_s > MAX_DATA_WAIT * step_s:
        yield f"{wait_s / step_s:.0%} data wait"
    for name, unit in (("tokens_per_s", "tok/s"), ("samples_per_s", "samples/s")):
        if (rate := _as_number(row.get(name))) is not None:
            yield f"{_format_large(rate)} {unit}"


def _format_value(value: Any, digits: int = 4) -> str:
    return f"{value:.{digits}g}" if isinstance(value, (float, int)) and not isinstance(value, bool) else str(value)


def _format_large(value: float) -> str:
    """Format a rate with three digits: ``812``, ``11.3k``, ``2.05M``."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}" if value < 999.5 * size else f"{value / size:,.0f}{unit}"
    return f"{value:.3g}"


def _as_number(value: Any) -> float | None:
    is_number = isinstance(value, (float, int)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
