"""What each column of a segment adds up to, with a histogram, so that a report needs no sample; and the file of it.

The file is replaced as a whole and says up to which ``d`` it counts; who reads it adds the samples from there on.
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
from clustertrain.telemetry.store.histogram import BINS, Column, Histogram, bins_of
from clustertrain.telemetry.store.rollup import Differences, Figures, Table

if TYPE_CHECKING:
    from clustertrain.telemetry.store.writer import Header

_PHASES = 16  # codes that are told apart; run/heartbeat.py has fewer
NAME = "totals.json.gz"


@dataclass
class Total:
    """Of one column. Counters are given as rates per second, of which ``count`` is the number of differences.

    ``increase``: what a counter grew by, without the differences where it began anew; 0 of a gauge. ``first`` and
    ``last``: the values that were read first and last. ``low``, ``high``, ``first``, ``last`` are NaN where there is
    none. ``by_phase``: for a GPU's columns (count, sum) by the code of the phase (``run/heartbeat.py``) of the GPU's
    rank.
    """

    count: int = 0
    sum: float = 0.0
    low: float = math.nan
    high: float = math.nan
    increase: float = 0.0
    first: float = math.nan
    last: float = math.nan
    histogram: Histogram = field(default_factory=Histogram)
    by_phase: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """The value below which the share ``q`` lies, within 1 %; NaN where nothing was counted."""
        return self.histogram.quantile(q, self.low, self.high)

    def merge(self, other: Total) -> None:
        """Add what ``other``, which came later, counted."""
        self.count += other.count
        self.sum += other.sum
        self.increase += other.increase
        if not other.low >= self.low:  # also where one of them is NaN
            self.low = self.low if math.isnan(other.low) else other.low
        if not other.high <= self.high:
            self.high = self.high if math.isnan(other.high) else other.high
        self.first = other.first if math.isnan(self.first) else self.first
        self.last = self.last if math.isnan(other.last) else other.last
        self.histogram.merge(other.histogram)
        for phase, (count, total) in other.by_phase.items():
            before = self.by_phase.get(phase, (0, 0.0))
            self.by_phase[phase] = (before[0] + count, before[1] + total)


class Sums(msgspec.Struct):
    """The file, columns side by side. ``d``: samples before it are counted, s. ``n``: rows of the fast pace;
    ``upto``: the ``d`` of the last row, None before the first. ``ended``: nothing follows, and if not None at which
    ``d``, for ``failure`` where not told to.

    ``bins`` and ``counts`` have the histograms one after the other, ``sizes`` bins a column; ``phases`` has column,
    phase, count and sum for each phase that occurred.
    """

    columns: list[str]
    d: float
    n: int
    upto: float | None
    count: list[int]
    sum: list[float]
    low: list[float | None]
    high: list[float | None]
    increase: list[float]
    first: list[float | None]
    last: list[float | None]
    last_d: list[float | None]
    newest: list[float | None]
    sizes: list[int]
    bins: list[int]
    counts: list[int]
    phases: list[tuple[int, int, int, float]]
    reasons: dict[str, str] = {}
    complete: bool = False
    end: float | None = None
    failure: str | None = None


def load(folder: Path) -> Sums | None:
    """None where there is none, or where it was damaged.

    Raises:
        PermissionError: it may not be read.
    """
    try:
        data = reading.read_bytes(folder / NAME, limits.MOST_BYTES)
    except PermissionError:
        raise
    except OSError:
        return None
    try:
        sums = schema.decode(reading.unpacked(data, limits.MOST_BYTES), Sums)
    except ValueError:
        return None
    return sums if _is_sound(sums) else None


_BY_COLUMN = ("count", "sum", "low", "high", "increase", "first", "last", "last_d", "newest", "sizes")


def _is_sound(sums: Sums) -> bool:
    """Its lists fit each other, and its numbers are those of samples."""
    lists: dict[str, list[Any]] = {name: getattr(sums, name) for name in _BY_COLUMN}
    numbers = [v for values in lists.values() for v in values if v is not None]
    whole = [*sums.count, *sums.sizes, *sums.counts, *(count for _, _, count, _ in sums.phases), sums.n]
    times = [t for t in (sums.d, sums.upto, sums.end, *sums.last_d) if t is not None]
    return (
        all(len(values) == len(sums.columns) for values in lists.values())
        and all(abs(v) <= limits.MOST_NUMBER for v in (*numbers, *(total for _, _, _, total in sums.phases)))
        and all(0 <= v < 2**53 for v in whole)
        and all(0 <= t <= limits.MOST_S for t in times)
        and sum(sums.sizes) == len(sums.bins) == len(sums.counts)
        and all(0 <= v < BINS for v in sums.bins)
        and all(0 <= at < len(sums.columns) and 0 <= phase < _PHASES for at, phase, _, _ in sums.phases)
    )


def dump(sums: Sums) -> bytes:
    return gzip.compress(msgspec.json.encode(sums), compresslevel=4, mtime=0)


def totals_of(sums: Sums) -> dict[str, Total]:
    """The file's content by column."""
    bins, counts = np.array(sums.bins, dtype=np.int64), np.array(sums.counts, dtype=np.int64)
    nan = math.nan
    found, begin = {}, 0
    for column, size, count, total, increase, *four in zip(
        sums.columns, sums.sizes, sums.count, sums.sum, sums.increase, sums.low, sums.high, sums.first, sums.last,
        strict=True,
    ):  # fmt: skip
        low, high, first, last = (nan if v is None else v for v in four)
        part = slice(begin, begin + size)
        begin += size
        found[column] = Total(count, total, low, high, increase, first, last, Histogram(bins[part], counts[part]))
    for at, phase, count, total in sums.phases:
        found[sums.columns[at]].by_phase[phase] = (count, total)
    return found


class _Lane:
    """What the columns of one pace have added up to so far."""

    def __init__(self, header: Header, columns: list[str]) -> None:
        n = len(columns)
        self.columns = columns
        self.differences = Differences(columns)
        self.count = np.zeros(n, dtype=np.int64)
        self.sum, self.increase = np.zeros(n), np.zeros(n)
        self.low, self.high = np.full(n, np.nan), np.full(n, np.nan)
        self.first, self.newest = np.full(n, np.nan), np.full(n, np.nan)
        self.histogram = np.zeros((n, BINS), dtype=np.uint32)  # pages that are never touched take no memory
        self._phase_of, self._phased = _phases(header, columns)
        self.phase_count = np.zeros((_PHASES, n), dtype=np.int64)
        self.phase_sum = np.zeros((_PHASES, n))

    def add(self, figures: Figures, rows: Table) -> None:
        values = figures.values
        there = np.isfinite(values)
        self.count += there.sum(axis=0)
        self.sum += np.where(there, values, 0.0).sum(axis=0)
        self.increase += np.nansum(figures.increase, axis=0)
        self.low = np.fmin(self.low, np.fmin.reduce(values, axis=0))
        self.high = np.fmax(self.high, np.fmax.reduce(values, axis=0))
        self.newest = rows[-1]
        blank = np.isnan(self.first)
        if blank.any():
            answered = np.isfinite(rows)
            self.first[blank] = rows[np.argmax(answered, axis=0), np.arange(rows.shape[1])][blank]
        bins = np.nonzero(there)[1] * BINS + bins_of(values[there])
        np.add.at(self.histogram.reshape(-1), bins, np.uint32(1))  # flat: numpy is ten times as fast at it
        if len(self._phased):
            self._add_phases(values[:, self._phased], rows[:, self._phase_of])

    def _add_phases(self, values: Table, phase: Table) -> None:
        there = np.isfinite(values) & (phase >= 0) & (phase < _PHASES)
        width = len(self.columns)
        key = (np.where(there, phase, 0).astype(np.intp) * width + self._phased)[there]
        size = _PHASES * width
        self.phase_count += np.bincount(key, minlength=size).reshape(_PHASES, width)
        self.phase_sum += np.bincount(key, weights=values[there], minlength=size).reshape(_PHASES, width)


def _phases(header: Header, columns: list[str]) -> tuple[list[int], list[int]]:
    """Of each GPU's column that has a rank, where the rank's phase stands, and where the column itself does."""
    where = {c: i for i, c in enumerate(columns)}
    phase, phased = [], []
    for gpu, facts in enumerate(header.gpus):
        of = where.get(fields.column(f"rank{facts.ranks[0]}", "phase")) if facts.ranks else None
        for i, c in enumerate(columns):
            if of is not None and fields.split(c)[0] == f"gpu{gpu}":
                phase.append(of)
                phased.append(i)
    return phase, phased


class Adder:
    """Adds up a segment, row by row of its two paces."""

    def __init__(self, header: Header, before: Sums | None = None) -> None:
        """``before``: go on from there."""
        self.lanes = {pace: _Lane(header, columns) for pace, columns in header.paces().items()}
        self.n = 0
        self.d = 0.0
        self.upto: float | None = None
        if before is not None:
            self._resume(before)

    def add(self, pace: Pace, d: Column, rows: Table) -> Figures:
        """``d`` [n] ascending, ``rows`` [n, columns of the pace]; what they come to, for the roll-ups."""
        lane = self.lanes[pace]
        figures = lane.differences.figures(d, rows)
        if len(d):
            lane.add(figures, rows)
            self.upto = max(float(d[-1]), self.upto or 0.0)
            if pace == fields.FAST:
                self.n += len(d)
        return figures

    def sums(self, d: float, reasons: Mapping[str, str]) -> Sums:
        """What was added, which are the samples before ``d``."""
        lanes = list(self.lanes.values())
        columns = [c for lane in lanes for c in lane.columns]
        dense = [lane.histogram.reshape(-1) for lane in lanes]
        filled = [np.flatnonzero(counts > 0) for counts in dense]  # of booleans it is four times as quick
        sizes = [np.bincount(at // BINS, minlength=len(x.columns)) for at, x in zip(filled, lanes, strict=True)]
        phases: list[tuple[int, int, int, float]] = []
        for lane, offset in zip(lanes, (0, len(lanes[0].columns)), strict=True):
            for phase, at in np.argwhere(lane.phase_count).tolist():
                total = float(lane.phase_sum[phase, at])
                phases.append((at + offset, phase, int(lane.phase_count[phase, at]), total))
        whole = {
            name: np.concatenate([getattr(lane, name) for lane in lanes]).tolist()
            for name in ("count", "sum", "low", "high", "increase", "first", "newest")
        }
        last = {
            name: np.concatenate([getattr(lane.differences, name) for lane in lanes]) for name in ("last", "last_d")
        }
        return Sums(
            columns=columns,
            d=d,
            n=self.n,
            upto=self.upto,
            sizes=np.concatenate(sizes).tolist(),
            bins=np.concatenate([at % BINS for at in filled]).tolist(),
            counts=np.concatenate([counts[at] for counts, at in zip(dense, filled, strict=True)]).tolist(),
            phases=phases,
            reasons=dict(reasons),
            **whole,
            **{n: values.tolist() for n, values in last.items()},
        )

    def _resume(self, before: Sums) -> None:
        self.n, self.upto = before.n, before.upto
        where = {c: i for i, c in enumerate(before.columns)}
        ends = np.cumsum(before.sizes)
        for lane in self.lanes.values():
            at = [where[c] for c in lane.columns]
            for name in ("count", "sum", "low", "high", "increase", "first", "newest"):
                own = getattr(lane, name)
                own[:] = np.array(getattr(before, name), dtype=own.dtype)[at]
            for name in ("last", "last_d"):
                setattr(lane.differences, name, np.array(getattr(before, name), dtype=np.float64)[at])
            for own_at, i in enumerate(at):
                part = slice(int(ends[i]) - before.sizes[i], int(ends[i]))
                lane.histogram[own_at, before.bins[part]] = before.counts[part]
        offset = {i: (lane, j) for lane in self.lanes.values() for j, i in enumerate(where[c] for c in lane.columns)}
        for i, phase, count, total in before.phases:
            lane, at_column = offset[i]
            lane.phase_count[phase, at_column], lane.phase_sum[phase, at_column] = count, total
