"""Samples summed up in buckets of a minute and of a quarter of an hour; and the file that keeps them.

Buckets lie on multiples of their length in ``d``, the seconds since the segment's header. Gauges are summed up as they
are, counters as rates per second. Writer and reader share this code, so what a killed writer left out is made up for
from the samples.

The file is an array of fixed records, one a bucket. After the attempt that of the finest level is packed, column by
column. Neither is Parquet, since a report would then spend 0.2 s on importing its reader before it read the first byte.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from clustertrain import reading, schema
from clustertrain.telemetry import fields
from clustertrain.telemetry.store import limits
from clustertrain.telemetry.store.histogram import Column

LEVELS = (60, 900)  # s
Table = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
_MOST_COUNTED = 65_535
_BITS_DROPPED = 9  # of the 24 of single precision
_FIGURES = ("mean", "low", "high")


@dataclass(frozen=True)
class Buckets:
    """``d`` [n] where each bucket begins, s; the others are [n, columns], NaN where ``count`` is 0."""

    d: Column
    count: Table
    mean: Table
    low: Table
    high: Table

    def __len__(self) -> int:
        return len(self.d)


@dataclass(frozen=True)
class Figures:
    """Rows of samples made ready to be summed up.

    ``values`` [n, columns]: gauges as they are, of counters the rate per second since the value before. ``increase``:
    of counters the difference, else NaN. ``weight``: of counters the seconds of the difference, of gauges 1. NaN (in
    ``weight`` 0) where there is no value.
    """

    d: Column
    values: Table
    increase: Table
    weight: Table


class Differences:
    """Turns the rows of one pace into :class:`Figures`, and remembers the last value of each counter in between."""

    def __init__(self, columns: list[str], last: Column | None = None, last_d: Column | None = None) -> None:
        self.counter: Mask = np.array([_is_counter(c) for c in columns], dtype=bool)
        self.last = np.full(len(columns), np.nan) if last is None else last.copy()
        self.last_d = np.full(len(columns), np.nan) if last_d is None else last_d.copy()

    def figures(self, d: Column, rows: Table) -> Figures:
        """``d`` [n] ascending, ``rows`` [n, columns]."""
        values = rows.copy()
        weight = np.isfinite(rows).astype(np.float64)
        increase = np.full(rows.shape, np.nan)
        if self.counter.any() and len(d):
            difference, seconds = self._since_before(d, rows)
            with np.errstate(invalid="ignore", divide="ignore"):
                fits = (difference >= 0) & (seconds > 0)
                values[:, self.counter] = np.where(fits, difference / seconds, np.nan)
            increase[:, self.counter] = np.where(fits, difference, np.nan)
            weight[:, self.counter] = np.where(fits, seconds, 0.0)
        self._remember(d, rows)
        return Figures(d, values, increase, weight)

    def _since_before(self, d: Column, rows: Table) -> tuple[Table, Table]:
        """Of each counter the difference to the last value that was there, and over how many seconds."""
        counter = self.counter
        column = np.vstack((self.last[counter], rows[:, counter]))
        when = np.vstack((self.last_d[counter], np.broadcast_to(d[:, None], (len(d), int(counter.sum())))))
        there = np.isfinite(column)
        at = np.maximum.accumulate(np.where(there, np.arange(len(column))[:, None], 0), axis=0)[:-1]
        before = np.take_along_axis(column, at, axis=0)
        return column[1:] - before, when[1:] - np.take_along_axis(when, at, axis=0)

    def _remember(self, d: Column, rows: Table) -> None:
        there = np.isfinite(rows)
        some = there.any(axis=0)
        newest = len(rows) - 1 - np.argmax(there[::-1], axis=0)[some] if len(rows) else []
        self.last[some] = rows[newest, np.flatnonzero(some)]
        self.last_d[some] = d[newest]


def _is_counter(column: str) -> bool:
    field = fields.of(column)
    return field is not None and field.kind == "counter"


def bucketed(figures: Figures, step_s: float) -> Buckets:
    """Sum up by buckets of ``step_s``; buckets without a row are left out."""
    number = np.floor(figures.d / step_s)
    first = np.flatnonzero(np.diff(number, prepend=np.nan))
    return _grouped(
        first,
        number[first] * step_s,
        np.isfinite(figures.values).astype(np.float64),
        figures.weight,
        figures.values,
        figures.values,
        figures.values,
    )


def coarser(buckets: Buckets, step_s: float) -> Buckets:
    """Sum up buckets by longer ones, ``step_s`` a multiple of theirs; buckets without a row are left out."""
    number = np.floor(buckets.d / step_s)
    first = np.flatnonzero(np.diff(number, prepend=np.nan))
    b = buckets
    return _grouped(first, number[first] * step_s, b.count, b.count, b.mean, b.low, b.high)


def _grouped(first: npt.NDArray[np.intp], d: Column, count: Table, weight: Table, *of: Table) -> Buckets:
    mean, low, high = of
    if not len(first):
        nothing = np.empty((0, count.shape[1]))
        return Buckets(d, nothing, nothing, nothing, nothing)
    counts, weights = np.add.reduceat(count, first), np.add.reduceat(weight, first)
    there = counts > 0
    sums = np.add.reduceat(np.where(weight > 0, mean * weight, 0.0), first)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(there, sums / weights, np.nan)
    lows = np.where(there, np.fmin.reduceat(low, first), np.nan)
    return Buckets(d, counts, means, lows, np.where(there, np.fmax.reduceat(high, first), np.nan))


def joined(parts: list[Buckets], width: int) -> Buckets:
    """Side by side in time; where two have the same bucket, of which each saw a part, they are summed up."""
    d = np.concatenate([np.empty(0), *(p.d for p in parts)])
    empty = np.empty((0, width))
    tables = [np.vstack((empty, *(getattr(p, name) for p in parts))) for name in ("count", "mean", "low", "high")]
    whole = Buckets(d, *tables)
    if len(d) < 2 or bool(np.all(np.diff(d) > 0)):
        return whole
    order = np.argsort(d, kind="stable")
    whole = Buckets(d[order], *(t[order] for t in tables))
    first = np.flatnonzero(np.diff(whole.d, prepend=np.nan))
    return _grouped(first, whole.d[first], whole.count, whole.count, whole.mean, whole.low, whole.high)


def beside(parts: list[Buckets], widths: list[int]) -> Buckets:
    """The columns of ``parts`` next to each other; of a bucket that one of them lacks, its columns are missing."""
    d = np.unique(np.concatenate([p.d for p in parts]))
    tables = []
    for name, blank in (("count", 0.0), ("mean", np.nan), ("low", np.nan), ("high", np.nan)):
        whole = np.full((len(d), sum(widths)), blank)
        at = 0
        for part, width in zip(parts, widths, strict=True):
            whole[np.searchsorted(d, part.d), at : at + width] = getattr(part, name)
            at += width
        tables.append(whole)
    return Buckets(d, *tables)


def since(buckets: Buckets, d: float) -> Buckets:
    """Those that begin at ``d`` or later."""
    keep = buckets.d >= d
    b = buckets
    return Buckets(b.d[keep], b.count[keep], b.mean[keep], b.low[keep], b.high[keep])


def chosen(buckets: Buckets, at: list[int]) -> Buckets:
    """The columns ``at``, in that order."""
    b = buckets
    return Buckets(b.d, b.count[:, at], b.mean[:, at], b.low[:, at], b.high[:, at])


def path_of(folder: Path, step_s: int) -> Path:
    return folder / f"rollup-{step_s}.bin"


def packed_path(folder: Path, step_s: int) -> Path:
    return folder / f"rollup-{step_s}.packed"


def record_type(width: int) -> np.dtype[Any]:
    """A bucket on disk."""
    return np.dtype([("d", "<f8"), ("count", "<u2", (width,)), *((name, "<f4", (width,)) for name in _FIGURES)])


def _rounded(values: Table) -> npt.NDArray[np.float32]:
    """To 15 bits, 3e-5 of the value: what lies below is noise, and noise cannot be packed."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    half = np.uint32(1 << (_BITS_DROPPED - 1))
    mask = np.uint32(0xFFFFFFFF << _BITS_DROPPED & 0xFFFFFFFF)
    return np.where(np.isfinite(values), (bits + half) & mask, bits & mask).view("<f4")


def to_records(buckets: Buckets) -> npt.NDArray[Any]:
    records = np.zeros(len(buckets), dtype=record_type(buckets.count.shape[1]))
    records["d"] = buckets.d
    records["count"] = np.minimum(buckets.count, _MOST_COUNTED)
    for name in _FIGURES:
        records[name] = _rounded(getattr(buckets, name))
    return records


def read(folder: Path, step_s: int, width: int, columns: npt.NDArray[np.intp]) -> Buckets:
    """What was stored, of those of the ``width`` columns; half a record at the end of the file is left out.

    Raises:
        OSError: it cannot be read; FileNotFoundError where there is none.
        ValueError: it is damaged.
    """
    try:
        data = reading.read_bytes(path_of(folder, step_s), limits.MOST_BYTES)
    except FileNotFoundError:
        return _read_packed(packed_path(folder, step_s), width, columns)
    kind = record_type(width)
    records = np.frombuffer(data, dtype=kind, count=len(data) // kind.itemsize)
    # A machine that went down can leave zeros at the end of a file.
    return _of_records(records[: _in_order(records["d"])], columns)


def _in_order(d: npt.NDArray[Any]) -> int:
    """How many of the buckets, from the first on, lie within a segment and one after the other."""
    with np.errstate(invalid="ignore"):
        good = (d >= 0) & (d <= limits.MOST_S) & (np.diff(d, prepend=-1.0) > 0)
    return len(d) if good.all() else int(np.argmin(good))


def _of_records(records: npt.NDArray[Any], columns: npt.NDArray[np.intp] | slice) -> Buckets:
    with np.errstate(invalid="ignore"):  # a nan that signals becomes a quiet one
        tables = [records[name][:, columns].astype(np.float64) for name in ("count", *_FIGURES)]
    for table in tables[1:]:
        table[~np.isfinite(table)] = np.nan
    return Buckets(records["d"].astype(np.float64), *tables)


class _Index(msgspec.Struct):
    """The first line of a packed file: ``rows`` buckets; ``sizes`` [1 + columns] bytes of ``d`` and of each column."""

    rows: int
    sizes: list[int]


def pack(records: npt.NDArray[Any]) -> bytes:
    """The same records by column, each compressed for itself, so that a report unpacks only those that it shows."""
    pieces = [_shuffled(records["d"])]
    for i in range(records["count"].shape[1]):
        pieces.append(b"".join(_shuffled(records[name][:, i]) for name in ("count", *_FIGURES)))
    packed = [zlib.compress(piece, 9) for piece in pieces]
    index = msgspec.json.encode(_Index(len(records), [len(piece) for piece in packed]))
    return b"\n".join((index, b"".join(packed)))


def _shuffled(values: npt.NDArray[Any]) -> bytes:
    """First bytes, second bytes, …: those of like meaning beside each other are packed better."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1).T.tobytes()


def _read_packed(path: Path, width: int, columns: npt.NDArray[np.intp]) -> Buckets:
    data = reading.read_bytes(path, limits.MOST_BYTES)
    first, _, rest = data.partition(b"\n")
    index = schema.decode(first, _Index)
    if len(index.sizes) != 1 + width or sum(index.sizes) != len(rest) or min(index.sizes) < 0:
        raise ValueError(f"{path.name} is damaged")
    if not 0 <= index.rows <= limits.MOST_BYTES // 14:
        raise ValueError(f"{path.name} is damaged: {index.rows} rows")
    ends = np.cumsum(index.sizes)
    n = index.rows
    records = np.zeros(n, dtype=record_type(len(columns)))
    records["d"] = _unshuffled(reading.unpacked(rest[: ends[0]], 8 * n, zlib.MAX_WBITS), "<f8", n)
    for to, i in enumerate(columns.tolist()):
        piece = reading.unpacked(rest[ends[i] : ends[i + 1]], 14 * n, zlib.MAX_WBITS)
        records["count"][:, to] = _unshuffled(piece[: 2 * n], "<u2", n)
        for k, name in enumerate(_FIGURES):
            at = 2 * n + 4 * n * k
            records[name][:, to] = _unshuffled(piece[at : at + 4 * n], "<f4", n)
    return _of_records(records[: _in_order(records["d"])], slice(None))


def _unshuffled(data: bytes, kind: str, n: int) -> npt.NDArray[Any]:
    return np.ascontiguousarray(np.frombuffer(data, dtype=np.uint8).reshape(-1, n).T).view(kind).reshape(n)
