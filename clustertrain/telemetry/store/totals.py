"""Totals and histograms of a segment's columns, from which a report is made without reading samples; and their file.

The file is replaced as a whole and records the ``d`` up to which it counts; readers add the samples from there on.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from clustertrain import reading, schema
from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import Pace
from clustertrain.telemetry.store import limits
from clustertrain.telemetry.store.histogram import BINS, Column, Histogram, bin_indices
from clustertrain.telemetry.store.rollup import CounterDifferencer, PreparedSamples, Table

if TYPE_CHECKING:
    from clustertrain.telemetry.store.writer import Header

_MAX_PHASES = 16  # distinct phase codes; run/heartbeat.py has fewer
NAME = "totals.json.gz"


@dataclass
class Total:
    """Totals of one column. Counters are aggregated as rates per second."""

    count: int = 0
    """Number of values; for a counter, of differences."""
    sum: float = 0.0
    low: float = math.nan
    high: float = math.nan
    increase: float = 0.0
    """Increase of a counter without resets; 0 for a gauge."""
    first: float = math.nan  # first raw value
    last: float = math.nan  # last raw value
    histogram: Histogram = field(default_factory=Histogram)
    by_phase: dict[int, tuple[int, float]] = field(default_factory=dict)
    """For a GPU's columns, (count, sum) by the phase code (``run/heartbeat.py``) of the GPU's rank."""

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """Return the quantile ``q`` within 1 %; NaN without values."""
        return self.histogram.quantile(q, self.low, self.high)

    def merge(self, other: Total) -> None:
        """Add the totals of ``other``, which are later in time."""
        self.count += other.count
        self.sum += other.sum
        self.increase += other.increase
        if not other.low >= self.low:  # also true if one of them is NaN
            self.low = self.low if math.isnan(other.low) else other.low
        if not other.high <= self.high:
            self.high = self.high if math.isnan(other.high) else other.high
        self.first = other.first if math.isnan(self.first) else self.first
        self.last = self.last if math.isnan(other.last) else other.last
        self.histogram.merge(other.histogram)
        for phase, (count, total) in other.by_phase.items():
            before = self.by_phase.get(phase, (0, 0.0))
            self.by_phase[phase] = (before[0] + count, before[1] + total)


class SegmentTotals(msgspec.Struct):
    """Contents of the totals file. Lists have one entry per column unless noted."""

    columns: list[str]
    counted_until_d: float  # samples before it are counted, s
    samples: int  # rows of the fast pace
    last_sample_d: float | None  # ``d`` of the last row
    count: list[int]
    sum: list[float]
    low: list[float | None]
    high: list[float | None]
    increase: list[float]
    first: list[float | None]
    last: list[float | None]
    last_d: list[float | None]
    newest: list[float | None]
    sizes: list[int]  # number of histogram bins
    bins: list[int]  # histogram bins of all columns, concatenated
    counts: list[int]  # counts of ``bins``
    phases: list[tuple[int, int, int, float]]  # (column, phase, count, sum) for each phase that occurred
    reasons: dict[str, str] = {}  # by column, the last reason for a missing value
    is_final: bool = False  # no samples follow
    end: float | None = None  # ``d`` at which the sampler stopped
    failure: str | None = None  # why it stopped, unless it was asked to


def load_totals(folder: Path) -> SegmentTotals | None:
    """Load the totals of a segment; None if the file is missing or damaged.

    Raises:
        PermissionError: this user may not read the file.
    """
    try:
        data = reading.read_bytes(folder / NAME, limits.MAX_BYTES)
    except PermissionError:
        raise
    except OSError:
        return None
    try:
        sums = schema.decode(reading.decompress(data, limits.MAX_BYTES), SegmentTotals)
    except ValueError:
        return None
    return sums if _is_valid(sums) else None


_COLUMN_LISTS = ("count", "sum", "low", "high", "increase", "first", "last", "last_d", "newest", "sizes")


def _is_valid(sums: SegmentTotals) -> bool:
    """Return whether the lists have matching lengths and all numbers are in range."""
    lists: dict[str, list[Any]] = {name: getattr(sums, name) for name in _COLUMN_LISTS}
    numbers = [v for values in lists.values() for v in values if v is not None]
    integers = [*sums.count, *sums.sizes, *sums.counts, *(count for _, _, count, _ in sums.phases), sums.samples]
    times = [t for t in (sums.counted_until_d, sums.last_sample_d, sums.end, *sums.last_d) if t is not None]
    return (
        all(len(values) == len(sums.columns) for values in lists.values())
        and all(abs(v) <= limits.MAX_MAGNITUDE for v in (*numbers, *(total for _, _, _, total in sums.phases)))
        and all(0 <= v < 2**53 for v in integers)
        and all(0 <= t <= limits.MAX_SECONDS for t in times)
        and sum(sums.sizes) == len(sums.bins) == len(sums.counts)
        and all(0 <= v < BINS for v in sums.bins)
        and all(0 <= at < len(sums.columns) and 0 <= phase < _MAX_PHASES for at, phase, _, _ in sums.phases)
    )


def dump(sums: SegmentTotals) -> bytes:
    return gzip.compress(msgspec.json.encode(sums), compresslevel=4, mtime=0)


def totals_by_column(sums: SegmentTotals) -> dict[str, Total]:
    """Return the totals by column."""
    bins, counts = np.array(sums.bins, dtype=np.int64), np.array(sums.counts, dtype=np.int64)
    nan = math.nan
    totals, begin = {}, 0
    for column, size, count, total, increase, *edge_values in zip(
        sums.columns, sums.sizes, sums.count, sums.sum, sums.increase, sums.low, sums.high, sums.first, sums.last,
        strict=True,
    ):  # fmt: skip
        low, high, first, last = (nan if v is None else v for v in edge_values)
        bin_range = slice(begin, begin + size)
        begin += size
        totals[column] = Total(
            count, total, low, high, increase, first, last, Histogram(bins[bin_range], counts[bin_range])
        )
    for at, phase, count, total in sums.phases:
        totals[sums.columns[at]].by_phase[phase] = (count, total)
    return totals


class _PaceTotals:
    """Running totals of the columns of one pace."""

    def __init__(self, header: Header, columns: list[str]) -> None:
        n = len(columns)
        self.columns = columns
        self.differencer = CounterDifferencer(columns)
        self.count = np.zeros(n, dtype=np.int64)
        self.sum, self.increase = np.zeros(n), np.zeros(n)
        self.low, self.high = np.full(n, np.nan), np.full(n, np.nan)
        self.first, self.newest = np.full(n, np.nan), np.full(n, np.nan)
        self.histogram = np.zeros((n, BINS), dtype=np.uint32)  # untouched pages take no memory
        self._phase_columns, self._gpu_columns = _find_phase_columns(header, columns)
        self.phase_count = np.zeros((_MAX_PHASES, n), dtype=np.int64)
        self.phase_sum = np.zeros((_MAX_PHASES, n))

    def add(self, samples: PreparedSamples, rows: Table) -> None:
        values = samples.values
        present = np.isfinite(values)
        self.count += present.sum(axis=0)
        self.sum += np.where(present, values, 0.0).sum(axis=0)
        self.increase += np.nansum(samples.increase, axis=0)
        self.low = np.fmin(self.low, np.fmin.reduce(values, axis=0))
        self.high = np.fmax(self.high, np.fmax.reduce(values, axis=0))
        self.newest = rows[-1]
        unset = np.isnan(self.first)
        if unset.any():
            has_value = np.isfinite(rows)
            self.first[unset] = rows[np.argmax(has_value, axis=0), np.arange(rows.shape[1])][unset]
        bins = np.nonzero(present)[1] * BINS + bin_indices(values[present])
        np.add.at(self.histogram.reshape(-1), bins, np.uint32(1))  # numpy is ten times as fast on a flat array
        if len(self._gpu_columns):
            self._add_phases(values[:, self._gpu_columns], rows[:, self._phase_columns])

    def _add_phases(self, values: Table, phase: Table) -> None:
        present = np.isfinite(values) & (phase >= 0) & (phase < _MAX_PHASES)
        width = len(self.columns)
        key = (np.where(present, phase, 0).astype(np.intp) * width + self._gpu_columns)[present]
        size = _MAX_PHASES * width
        self.phase_count += np.bincount(key, minlength=size).reshape(_MAX_PHASES, width)
        self.phase_sum += np.bincount(key, weights=values[present], minlength=size).reshape(_MAX_PHASES, width)


def _find_phase_columns(header: Header, columns: list[str]) -> tuple[list[int], list[int]]:
    """Return, for all columns of GPUs with a rank, the indices of the rank's phase column and of the column itself."""
    index_by_column = {c: i for i, c in enumerate(columns)}
    phase_columns, gpu_columns = [], []
    for gpu, facts in enumerate(header.gpus):
        phase_column = (
            index_by_column.get(fields.column_name(f"rank{facts.ranks[0]}", "phase")) if facts.ranks else None
        )
        for i, c in enumerate(columns):
            if phase_column is not None and fields.split_column(c)[0] == f"gpu{gpu}":
                phase_columns.append(phase_column)
                gpu_columns.append(i)
    return phase_columns, gpu_columns


class TotalsAccumulator:
    """Accumulates the totals of a segment."""

    def __init__(self, header: Header, previous: SegmentTotals | None = None) -> None:
        """Start from ``previous`` if given, else from zero."""
        self.by_pace = {pace: _PaceTotals(header, columns) for pace, columns in header.paces().items()}
        self.n = 0
        self.d = 0.0
        self.last_sample_d: float | None = None
        if previous is not None:
            self._resume(previous)

    def add(self, pace: Pace, d: Column, rows: Table) -> PreparedSamples:
        """Add rows, and return them prepared for the roll-ups; ``d`` [n] ascending, ``rows`` [n, columns]."""
        pace_totals = self.by_pace[pace]
        samples = pace_totals.differencer.prepare(d, rows)
        if len(d):
            pace_totals.add(samples, rows)
            self.last_sample_d = max(float(d[-1]), self.last_sample_d or 0.0)
            if pace == fields.FAST:
                self.n += len(d)
        return samples

    def build_totals(self, d: float, reasons: Mapping[str, str]) -> SegmentTotals:
        """Return the totals of all added rows, which are the samples before ``d``."""
        by_pace = list(self.by_pace.values())
        columns = [c for pace_totals in by_pace for c in pace_totals.columns]
        dense = [pace_totals.histogram.reshape(-1) for pace_totals in by_pace]
        nonzero = [np.flatnonzero(counts > 0) for counts in dense]  # four times as fast on booleans
        sizes = [np.bincount(at // BINS, minlength=len(x.columns)) for at, x in zip(nonzero, by_pace, strict=True)]
        phases: list[tuple[int, int, int, float]] = []
        for pace_totals, offset in zip(by_pace, (0, len(by_pace[0].columns)), strict=True):
            for phase, at in np.argwhere(pace_totals.phase_count).tolist():
                total = float(pace_totals.phase_sum[phase, at])
                phases.append((at + offset, phase, int(pace_totals.phase_count[phase, at]), total))
        column_values = {
            name: np.concatenate([getattr(pace_totals, name) for pace_totals in by_pace]).tolist()
            for name in ("count", "sum", "low", "high", "increase", "first", "newest")
        }
        last = {
            name: np.concatenate([getattr(pace_totals.differencer, name) for pace_totals in by_pace])
            for name in ("last", "last_d")
        }
        return SegmentTotals(
            columns=columns,
            counted_until_d=d,
            samples=self.n,
            last_sample_d=self.last_sample_d,
            sizes=np.concatenate(sizes).tolist(),
            bins=np.concatenate([at % BINS for at in nonzero]).tolist(),
            counts=np.concatenate([counts[at] for counts, at in zip(dense, nonzero, strict=True)]).tolist(),
            phases=phases,
            reasons=dict(reasons),
            **column_values,
            **{n: values.tolist() for n, values in last.items()},
        )

    def _resume(self, previous: SegmentTotals) -> None:
        self.n, self.last_sample_d = previous.samples, previous.last_sample_d
        index_by_column = {c: i for i, c in enumerate(previous.columns)}
        ends = np.cumsum(previous.sizes)
        for pace_totals in self.by_pace.values():
            indices = [index_by_column[c] for c in pace_totals.columns]
            for name in ("count", "sum", "low", "high", "increase", "first", "newest"):
                target = getattr(pace_totals, name)
                target[:] = np.array(getattr(previous, name), dtype=target.dtype)[indices]
            for name in ("last", "last_d"):
                setattr(pace_totals.differencer, name, np.array(getattr(previous, name), dtype=np.float64)[indices])
            for row, i in enumerate(indices):
                bin_range = slice(int(ends[i]) - previous.sizes[i], int(ends[i]))
                pace_totals.histogram[row, previous.bins[bin_range]] = previous.counts[bin_range]
        location_by_column = {
            i: (pace_totals, j)
            for pace_totals in self.by_pace.values()
            for j, i in enumerate(index_by_column[c] for c in pace_totals.columns)
        }
        for i, phase, count, total in previous.phases:
            pace_totals, at_column = location_by_column[i]
            pace_totals.phase_count[phase, at_column], pace_totals.phase_sum[phase, at_column] = count, total
