"""Resampling of many segments' roll-ups onto one grid of equal steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from clustertrain.telemetry import fields
from clustertrain.telemetry.store.reader import RecordedSegment

Column = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]  # [rows, points], NaN if nothing was recorded

_STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 180, 300, 600, 900, 1800, 2700, 3600, 7200, 10800, 21600, 43200, 86400)
_DAY = 86400


@dataclass(frozen=True)
class CurveTable:
    """Means of several curves in equal steps."""

    start: float  # UTC epoch s
    step_s: float
    points: int
    values: dict[str, Matrix] = field(default_factory=dict)
    """[rows, points] by curve; only curves with a value."""

    def rows(self, indices: Sequence[int]) -> CurveTable:
        """Return the table with these rows, without curves that have no value in them."""
        selected = {name: m[list(indices)] for name, m in self.values.items()}
        return CurveTable(
            self.start, self.step_s, self.points, {k: m for k, m in selected.items() if np.isfinite(m).any()}
        )


@dataclass(frozen=True)
class Grid:
    """Equal steps in time."""

    start: float
    step_s: float
    points: int

    @staticmethod
    def covering(start: float, span: float, min_step_s: float) -> Grid:
        """Return a grid over ``span`` seconds with the shortest usual step that is at least ``min_step_s``."""
        step = float(next((s for s in _STEPS if s >= min_step_s - 1e-9), np.ceil(min_step_s / _DAY) * _DAY))
        return Grid(start, step, int(span / step + 1e-6) + 1 if span else 0)

    def bins(self, t: Column) -> npt.NDArray[np.int64]:
        """Return the point of each time; -1 outside the grid."""
        index = np.floor((t - self.start) / self.step_s + 1e-6).astype(np.int64)
        return np.where((index >= 0) & (index < self.points), index, -1)


@dataclass(frozen=True)
class SampleSeries:
    """Values of one column over time."""

    t: Column  # UTC epoch s
    values: Column  # counters as rates per second
    weights: Column  # number of samples of each value


def load_series(segment: RecordedSegment, columns: Sequence[str], step_s: float) -> dict[str, SampleSeries]:
    """Load the columns that the segment has from its roll-up of ``step_s``."""
    rollup = segment.rollup(step_s, columns)
    midpoints = rollup.t + rollup.step_s / 2
    count, mean = np.asarray(rollup.count, dtype=np.float64), np.asarray(rollup.mean, dtype=np.float64)
    return {
        name: SampleSeries(midpoints, mean[:, i], count[:, i])
        for i, name in enumerate(rollup.columns)
        if len(midpoints)
    }


class GridSums:
    """Accumulator of values and sample counts by curve, row and point."""

    def __init__(self, grid: Grid, rows: int) -> None:
        self.grid, self.rows = grid, rows
        self._sums: dict[str, tuple[Matrix, Matrix]] = {}

    def add(
        self, row: int, columns: Mapping[str, SampleSeries], device: str, curves: Mapping[str, Sequence[str]]
    ) -> None:
        """Add a device's columns to a row; ``curves`` maps a curve to the device's fields whose sum it shows."""
        for name, field_names in curves.items():
            series = [columns[c] for c in (fields.column_name(device, part) for part in field_names) if c in columns]
            if series:
                self.add_series(
                    row, name, SampleSeries(series[0].t, np.sum([p.values for p in series], axis=0), series[0].weights)
                )

    def add_series(self, row: int, name: str, series: SampleSeries) -> None:
        """Add a series to a curve of a row."""
        bins = self.grid.bins(series.t)
        valid = np.isfinite(series.values) & (series.weights > 0) & (bins >= 0)
        if not valid.any():
            return
        if name not in self._sums:
            shape = (self.rows, self.grid.points)
            self._sums[name] = (np.zeros(shape), np.zeros(shape))
        total, sample_count = self._sums[name]
        bins, weights = bins[valid], series.weights[valid]
        total[row] += np.bincount(bins, weights=series.values[valid] * weights, minlength=self.grid.points)
        sample_count[row] += np.bincount(bins, weights=weights, minlength=self.grid.points)

    def table(self, names: Sequence[str] | None = None, group_size: int = 1) -> CurveTable:
        """Return the means of all curves (or of ``names``), merging ``group_size`` points into one."""
        values = {}
        for name, (total, sample_count) in self._sums.items():
            if names is None or name in names:
                with np.errstate(invalid="ignore"):
                    values[name] = _sum_groups(total, group_size) / _sum_groups(sample_count, group_size)
        return CurveTable(self.grid.start, self.grid.step_s * group_size, -(-self.grid.points // group_size), values)


def _sum_groups(matrix: Matrix, group_size: int) -> Matrix:
    """Sum groups of ``group_size`` neighbors; the last group may be smaller."""
    if group_size == 1:
        return matrix
    return np.add.reduceat(matrix, np.arange(0, matrix.shape[1], group_size), axis=1)
