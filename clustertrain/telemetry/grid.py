"""Samples and roll-ups of many segments, brought onto one grid of equal steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from clustertrain.telemetry import fields
from clustertrain.telemetry.series import Segment

Column = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]  # [rows, points], NaN where nothing was recorded

_STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 180, 300, 600, 900, 1800, 2700, 3600, 7200, 10800, 21600, 43200, 86400)
_DAY = 86400


@dataclass(frozen=True)
class Table:
    """Means in equal steps from ``start`` (UTC epoch s) on, by curve: [rows, points]. Only curves that have a value."""

    start: float
    step_s: float
    points: int
    values: dict[str, Matrix] = field(default_factory=dict)

    def rows(self, chosen: Sequence[int]) -> Table:
        """Those rows, and the curves that still have a value."""
        picked = {name: m[list(chosen)] for name, m in self.values.items()}
        return Table(self.start, self.step_s, self.points, {k: m for k, m in picked.items() if np.isfinite(m).any()})


@dataclass(frozen=True)
class Grid:
    start: float
    step_s: float
    points: int

    @staticmethod
    def over(start: float, span: float, at_least: float) -> Grid:
        """With the least of the usual steps that is ``at_least`` so long."""
        step = float(next((s for s in _STEPS if s >= at_least - 1e-9), np.ceil(at_least / _DAY) * _DAY))
        return Grid(start, step, int(span / step + 1e-6) + 1 if span else 0)

    def bins(self, t: Column) -> npt.NDArray[np.int64]:
        """The point of each moment; -1 outside."""
        at = np.floor((t - self.start) / self.step_s + 1e-6).astype(np.int64)
        return np.where((at >= 0) & (at < self.points), at, -1)


@dataclass(frozen=True)
class Piece:
    """One column: moments (UTC epoch s), values (of counters the rate per second), and of how many samples each is."""

    t: Column
    values: Column
    weights: Column


class Columns:
    """The columns of a segment: its samples, or with ``rollup_s`` its roll-up."""

    def __init__(self, segment: Segment, wanted: Sequence[str], rollup_s: int | None) -> None:
        self._pieces: dict[str, Piece] = {}
        if rollup_s is None:
            self._read_samples(segment, wanted)
        else:
            self._read_rollup(segment, wanted, rollup_s)

    def get(self, column: str) -> Piece | None:
        return self._pieces.get(column)

    def _read_rollup(self, segment: Segment, wanted: Sequence[str], rollup_s: int) -> None:
        rollup = segment.rollup(rollup_s)
        if not len(rollup.t):
            return
        middle = rollup.t + rollup.step_s / 2
        numbers = {name: i for i, name in enumerate(rollup.columns)}
        for name in wanted:
            i = numbers.get(name)
            if i is not None:
                weights = np.asarray(rollup.count[:, i], dtype=np.float64)
                self._pieces[name] = Piece(middle, np.asarray(rollup.mean[:, i], dtype=np.float64), weights)

    def _read_samples(self, segment: Segment, wanted: Sequence[str]) -> None:
        for pace, known in ((fields.FAST, segment.header.fast), (fields.SLOW, segment.header.slow)):
            chosen = [c for c in known if c in set(wanted)]
            if not chosen:
                continue
            frame = segment.samples(pace, chosen)
            ones = np.ones(len(frame.t))
            for name, values in frame.values.items():
                about = fields.of(name)
                counts = about is not None and about.kind == "counter"
                self._pieces[name] = Piece(frame.t, _rate(frame.t, values) if counts else values, ones)


def _rate(t: Column, values: Column) -> Column:
    """Per second, since the sample before that has a value; NaN where the counter began anew."""
    rate = np.full(len(values), np.nan)
    there = np.flatnonzero(np.isfinite(values))
    if len(there) > 1:
        width, rise = np.diff(t[there]), np.diff(values[there])
        good = (width > 0) & (rise >= 0)
        rate[there[1:][good]] = rise[good] / width[good]
    return rate


class Sums:
    """Sums and numbers of samples by curve, row and point."""

    def __init__(self, grid: Grid, rows: int) -> None:
        self.grid, self.rows = grid, rows
        self._of: dict[str, tuple[Matrix, Matrix]] = {}

    def add(self, row: int, columns: Columns, device: str, wanted: Mapping[str, Sequence[str]]) -> None:
        """``wanted``: the curve's name and the fields of ``device`` that it is the sum of."""
        for name, parts in wanted.items():
            found = [p for p in (columns.get(fields.column(device, part)) for part in parts) if p is not None]
            if found:
                self.put(row, name, Piece(found[0].t, np.sum([p.values for p in found], axis=0), found[0].weights))

    def put(self, row: int, name: str, piece: Piece) -> None:
        at = self.grid.bins(piece.t)
        there = np.isfinite(piece.values) & (piece.weights > 0) & (at >= 0)
        if not there.any():
            return
        if name not in self._of:
            shape = (self.rows, self.grid.points)
            self._of[name] = (np.zeros(shape), np.zeros(shape))
        total, number = self._of[name]
        at, weights = at[there], piece.weights[there]
        total[row] += np.bincount(at, weights=piece.values[there] * weights, minlength=self.grid.points)
        number[row] += np.bincount(at, weights=weights, minlength=self.grid.points)

    def table(self, names: Sequence[str] | None = None, together: int = 1) -> Table:
        """Means of all curves, or those of ``names``, ``together`` points in one."""
        values = {}
        for name, (total, number) in self._of.items():
            if names is None or name in names:
                with np.errstate(invalid="ignore"):
                    values[name] = _grouped(total, together) / _grouped(number, together)
        return Table(self.grid.start, self.grid.step_s * together, -(-self.grid.points // together), values)


def _grouped(matrix: Matrix, together: int) -> Matrix:
    """Sums of ``together`` neighbours; the last of what is left."""
    if together == 1:
        return matrix
    return np.add.reduceat(matrix, np.arange(0, matrix.shape[1], together), axis=1)
