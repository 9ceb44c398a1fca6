"""The training curves of a run, read once and then only where the files grow.

A long run is kept as buckets of consecutive rows with the mean, lowest and highest value of each scalar. Their number
is limited: when there are too many, each pair of neighbors becomes one.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from clustertrain.run import metrics_file
from clustertrain.run.json_files import is_number
from clustertrain.run.run_dir import RunDir

MAX_BUCKETS = 2000
MAX_SCALARS = 400
MAX_NEW_ROWS = 2000  # a page that has missed more reads the curves again
_NO_SCALARS = frozenset({"step", "t", "attempt", "file"})
_DIGITS = 7

Column = npt.NDArray[np.float64]


class Source(NamedTuple):
    """A file of rows, in which steps rise."""

    attempt: int
    path: Path


class _Scalar:
    """The sums, counts, lowest and highest values of one scalar by bucket; NaN and 0 where no row has it."""

    def __init__(self, total: Column, count: Column, low: Column, high: Column) -> None:
        self.total, self.count, self.low, self.high = total, count, low, high

    @classmethod
    def of_rows(cls, values: Column) -> _Scalar:
        known = np.isfinite(values)
        return cls(np.where(known, values, 0.0), known.astype(np.float64), values, values)

    @classmethod
    def missing(cls, buckets: int) -> _Scalar:
        nothing, zero = np.full(buckets, np.nan), np.zeros(buckets)
        return cls(zero, zero, nothing, nothing)

    def append(self, other: _Scalar) -> _Scalar:
        return _Scalar(*(np.concatenate(pair) for pair in zip(self.parts, other.parts, strict=True)))

    def merge(self, starts: npt.NDArray[np.intp]) -> _Scalar:
        return _Scalar(
            np.add.reduceat(self.total, starts),
            np.add.reduceat(self.count, starts),
            np.fmin.reduceat(self.low, starts),
            np.fmax.reduceat(self.high, starts),
        )

    @property
    def parts(self) -> tuple[Column, Column, Column, Column]:
        return self.total, self.count, self.low, self.high


class MetricCurves:
    """The scalars of one run. Safe in threads."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._lock = threading.Lock()
        self.generation = 0
        """Counts how often the curves began anew because a file was replaced."""
        self._clear()

    def _clear(self) -> None:
        self._offsets: dict[Source, int] = {}
        self._width = 1  # rows of a bucket
        empty = np.empty(0)
        self._file, self._first_row, self._step, self._t = empty, empty, empty, empty
        self._rows_of_file: list[int] = []
        self._scalars: dict[str, _Scalar] = {}
        self._left_out: set[str] = set()
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_NEW_ROWS)
        self._problems: dict[Path, str] = {}
        self.num_rows = 0

    def update(self, *, wait: bool = True) -> bool:
        """Read what the run has written; return whether there was anything.

        Args:
            wait: for another thread that is reading; otherwise return False at once if there is one.

        A file that cannot be read is left out, and named in the document.

        Raises:
            OSError: the attempts cannot be listed.
        """
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            return self._update()
        finally:
            self._lock.release()

    def _update(self) -> bool:
        sources = [Source(a.n, path) for a in self._run.attempts() for path in self._run.metrics_files(a.n)]
        before = self.num_rows, self.generation
        known = list(self._offsets)
        if known != sources[: len(known)] or any(_size(s.path) < offset for s, offset in self._offsets.items()):
            self._clear()
            self.generation += 1
        for source in sources:
            self._offsets.setdefault(source, 0)
        for number, source in enumerate(sources):
            try:
                self._read(number, source)
                self._problems.pop(source.path, None)
            except OSError as e:
                self._problems[source.path] = f"{source.path.name}: {e.strerror or e}"
        return before != (self.num_rows, self.generation)

    def _read(self, number: int, source: Source) -> None:
        while True:
            rows, end = metrics_file.read_after(source.path, self._offsets[source])
            if end == self._offsets[source]:
                return
            self._offsets[source] = end
            self._add(number, source.attempt, rows)

    def _add(self, number: int, attempt: int, rows: Iterable[dict[str, Any]]) -> None:
        valid = [r for r in rows if type(r.get("step")) is int and is_number(r["step"]) and is_number(r.get("t"))]
        if not valid:
            return
        while len(self._rows_of_file) <= number:
            self._rows_of_file.append(0)
        first = self._rows_of_file[number]
        self._rows_of_file[number] += len(valid)
        self.num_rows += len(valid)
        columns = self._columns(valid)
        self._recent.extend((attempt, row) for row in valid[-MAX_NEW_ROWS:])
        n = len(valid)
        self._file = np.append(self._file, np.full(n, number))
        self._first_row = np.append(self._first_row, np.arange(first, first + n))
        self._step = np.append(self._step, [r["step"] for r in valid])
        self._t = np.append(self._t, [r["t"] for r in valid])
        for name, scalar in self._scalars.items():
            new = _Scalar.of_rows(columns[name]) if name in columns else _Scalar.missing(n)
            self._scalars[name] = scalar.append(new)
        self._merge()

    def _columns(self, rows: Sequence[dict[str, Any]]) -> dict[str, Column]:
        """Return the rows' scalars as columns; scalars beyond the limit are left out."""
        names = dict.fromkeys(itertools.chain.from_iterable(rows))
        columns = {}
        for name in names:
            if name in _NO_SCALARS or name.startswith("sum_"):
                continue
            column = _to_column([row.get(name) for row in rows])
            if column is not None and self._admit(name):
                columns[name] = column
        return columns

    def _admit(self, name: str) -> bool:
        if name not in self._scalars:
            if len(self._scalars) >= MAX_SCALARS:
                self._left_out.update([name] if len(self._left_out) < MAX_SCALARS else [])
                return False
            self._scalars[name] = _Scalar.missing(len(self._step))
        return True

    def _merge(self) -> None:
        """Merge the buckets that belong together; double the width until there are few enough."""
        while True:
            places = np.floor(self._first_row / self._width)
            is_start = np.ones(len(places), dtype=bool)
            is_start[1:] = (np.diff(places) != 0) | (np.diff(self._file) != 0)
            if is_start.sum() <= max(MAX_BUCKETS, 2 * len(self._rows_of_file)):
                break
            self._width *= 2
        if is_start.all():
            return
        starts = np.flatnonzero(is_start)
        ends = np.append(starts[1:], len(places)) - 1
        self._file, self._first_row = self._file[starts], self._first_row[starts]
        self._step, self._t = self._step[ends], self._t[ends]
        self._scalars = {name: scalar.merge(starts) for name, scalar in self._scalars.items()}

    def names(self) -> list[str]:
        """Return the scalars in the order of their first appearance."""
        with self._lock:
            return list(self._scalars)

    def document(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the curves as JSON.

        ``steps``, ``times`` (UTC epoch s) and ``attempts`` have one value per bucket, and so have the lists in
        ``curves``, with null where no row has the scalar. ``ranges`` has the lowest and highest values if buckets have
        several rows. ``rows`` is the cursor for :meth:`rows_after`.
        """
        with self._lock:
            chosen = [n for n in (self._scalars if names is None else dict.fromkeys(names)) if n in self._scalars]
            attempts = [source.attempt for source in self._offsets]
            curves = {name: self._mean(name) for name in chosen}
            ranges = (
                {n: [_to_list(self._scalars[n].low), _to_list(self._scalars[n].high)] for n in chosen}
                if self._width > 1
                else {}
            )
            return {
                "generation": self.generation,
                "rows": self.num_rows,
                "rows_per_point": self._width,
                "names": list(self._scalars),
                "left_out": sorted(self._left_out),
                "problems": sorted(self._problems.values()),
                "steps": [int(s) for s in self._step],
                "times": [round(float(t), 3) for t in self._t],
                "attempts": [attempts[int(n)] for n in self._file],
                "curves": curves,
                "ranges": ranges,
            }

    def _mean(self, name: str) -> list[float | None]:
        scalar = self._scalars[name]
        with np.errstate(invalid="ignore"):
            return _to_list(scalar.total / scalar.count)

    def rows_after(self, generation: int, rows: int) -> list[dict[str, Any]] | None:
        """Return the rows after the first ``rows``; None if the page must read the curves again."""
        with self._lock:
            new = self.num_rows - rows
            if generation != self.generation or not 0 <= new <= len(self._recent):
                return None
            recent = list(itertools.islice(self._recent, len(self._recent) - new, None))
            return [self._row_document(attempt, row) for attempt, row in recent]

    def _row_document(self, attempt: int, row: dict[str, Any]) -> dict[str, Any]:
        scalars = {k: _round(v) for k, v in row.items() if k in self._scalars and is_number(v)}
        return {"attempt": attempt, "step": row["step"], "t": row["t"], "scalars": scalars}


def _to_column(values: list[Any]) -> Column | None:
    """Return the numbers among ``values``, NaN for other values; None if there is no number."""
    try:
        column = np.array(values, dtype=np.float64)  # None becomes NaN
        if bool not in set(map(type, values)):
            return column if np.isfinite(column).any() else None
    except (TypeError, ValueError, OverflowError):  # text, a list
        pass
    numbers = [float(v) if is_number(v) else math.nan for v in values]
    return np.array(numbers) if any(map(math.isfinite, numbers)) else None


def _to_list(values: Column) -> list[float | None]:
    return [_round(v) if math.isfinite(v) else None for v in values.tolist()]


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
