"""Roll-ups of many segments, brought onto one grid of equal steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from clustertrain.telemetry import fields
from clustertrain.telemetry.store.reader import Segment

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


def pieces(segment: Segment, wanted: Sequence[str], step_s: float) -> dict[str, Piece]:
    """Those of the columns ``wanted`` that the segment has, from its roll-up of ``step_s``."""
    rollup = segment.rollup(step_s, wanted)
    middle = rollup.t + rollup.step_s / 2
    count, mean = np.asarray(rollup.count, dtype=np.float64), np.asarray(rollup.mean, dtype=np.float64)
    return {name: Piece(middle, mean[:, i], count[:, i]) for i, name in enumerate(rollup.columns) if len(middle)}


class Sums:
    """Sums and numbers of samples by curve, row and point."""

    def __init__(self, grid: Grid, rows: int) -> None:
        self.grid, self.rows = grid, rows
        self._of: dict[str, tuple[Matrix, Matrix]] = {}

    def add(self, row: int, columns: Mapping[str, Piece], device: str, wanted: Mapping[str, Sequence[str]]) -> None:
        """``wanted``: the curve's name and the fields of ``device`` that it is the sum of."""
        for name, parts in wanted.items():
            found = [columns[c] for c in (fields.column(device, part) for part in parts) if c in columns]
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
