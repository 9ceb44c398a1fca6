"""Roll-ups: samples aggregated in buckets of 1 and 15 minutes, and their file format.

Buckets start at multiples of their length in ``d``, the seconds since the segment's header. Gauges are aggregated as
they are, counters as rates per second. Writer and reader share this code: the reader computes the buckets that a killed
writer left out from the samples.

The file is an array of fixed-size records, one per bucket. After the attempt, the file of the finest level is packed by
column. Neither is Parquet, because importing its reader would add 0.2 s to every report.
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
_MAX_COUNT = 65_535
_BITS_DROPPED = 9  # of the 24 of single precision
_STATISTICS = ("mean", "low", "high")


@dataclass(frozen=True)
class Buckets:
    """Aggregates by bucket. Tables are [n, columns], NaN where ``count`` is 0."""

    d: Column  # [n], start of each bucket in s
    count: Table
    mean: Table
    low: Table
    high: Table

    def __len__(self) -> int:
        return len(self.d)


@dataclass(frozen=True)
class PreparedSamples:
    """Rows of samples ready for aggregation. Missing values are NaN, with weight 0."""

    d: Column  # [n], s
    values: Table
    """[n, columns]: gauges as they are, counters as rates per second since the previous value."""
    increase: Table
    """[n, columns]: differences of counters, NaN for gauges."""
    weight: Table
    """[n, columns]: seconds of the difference for counters, 1 for gauges."""


class CounterDifferencer:
    """Turns rows of one pace into :class:`PreparedSamples`; keeps the last value of each counter between calls."""

    def __init__(self, columns: list[str], last: Column | None = None, last_d: Column | None = None) -> None:
        self.counter: Mask = np.array([_is_counter(c) for c in columns], dtype=bool)
        self.last = np.full(len(columns), np.nan) if last is None else last.copy()
        self.last_d = np.full(len(columns), np.nan) if last_d is None else last_d.copy()

    def prepare(self, d: Column, rows: Table) -> PreparedSamples:
        """Prepare rows for aggregation; ``d`` [n] ascending, ``rows`` [n, columns]."""
        values = rows.copy()
        weight = np.isfinite(rows).astype(np.float64)
        increase = np.full(rows.shape, np.nan)
        if self.counter.any() and len(d):
            difference, seconds = self._differences_to_previous(d, rows)
            with np.errstate(invalid="ignore", divide="ignore"):
                valid = (difference >= 0) & (seconds > 0)
                values[:, self.counter] = np.where(valid, difference / seconds, np.nan)
            increase[:, self.counter] = np.where(valid, difference, np.nan)
            weight[:, self.counter] = np.where(valid, seconds, 0.0)
        self._remember(d, rows)
        return PreparedSamples(d, values, increase, weight)

    def _differences_to_previous(self, d: Column, rows: Table) -> tuple[Table, Table]:
        """Return for each counter the difference to its previous value, and the seconds in between."""
        counter = self.counter
        values = np.vstack((self.last[counter], rows[:, counter]))
        times = np.vstack((self.last_d[counter], np.broadcast_to(d[:, None], (len(d), int(counter.sum())))))
        present = np.isfinite(values)
        previous_row = np.maximum.accumulate(np.where(present, np.arange(len(values))[:, None], 0), axis=0)[:-1]
        previous = np.take_along_axis(values, previous_row, axis=0)
        return values[1:] - previous, times[1:] - np.take_along_axis(times, previous_row, axis=0)

    def _remember(self, d: Column, rows: Table) -> None:
        present = np.isfinite(rows)
        has_value = present.any(axis=0)
        newest = len(rows) - 1 - np.argmax(present[::-1], axis=0)[has_value] if len(rows) else []
        self.last[has_value] = rows[newest, np.flatnonzero(has_value)]
        self.last_d[has_value] = d[newest]


def _is_counter(column: str) -> bool:
    field = fields.find_field(column)
    return field is not None and field.metric_type == "counter"


def build_buckets(samples: PreparedSamples, step_s: float) -> Buckets:
    """Aggregate samples into buckets of ``step_s``; omit buckets without a row."""
    bucket_index = np.floor(samples.d / step_s)
    first = np.flatnonzero(np.diff(bucket_index, prepend=np.nan))
    return _aggregate(
        first,
        bucket_index[first] * step_s,
        np.isfinite(samples.values).astype(np.float64),
        samples.weight,
        samples.values,
        samples.values,
        samples.values,
    )


def coarsen(buckets: Buckets, step_s: float) -> Buckets:
    """Aggregate buckets into longer ones; ``step_s`` is a multiple of their length. Omit buckets without a row."""
    bucket_index = np.floor(buckets.d / step_s)
    first = np.flatnonzero(np.diff(bucket_index, prepend=np.nan))
    b = buckets
    return _aggregate(first, bucket_index[first] * step_s, b.count, b.count, b.mean, b.low, b.high)


def _aggregate(first: npt.NDArray[np.intp], d: Column, count: Table, weight: Table, *tables: Table) -> Buckets:
    mean, low, high = tables
    if not len(first):
        empty = np.empty((0, count.shape[1]))
        return Buckets(d, empty, empty, empty, empty)
    counts, weights = np.add.reduceat(count, first), np.add.reduceat(weight, first)
    has_value = counts > 0
    sums = np.add.reduceat(np.where(weight > 0, mean * weight, 0.0), first)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(has_value, sums / weights, np.nan)
    lows = np.where(has_value, np.fmin.reduceat(low, first), np.nan)
    return Buckets(d, counts, means, lows, np.where(has_value, np.fmax.reduceat(high, first), np.nan))


def concat_buckets(buckets: list[Buckets], width: int) -> Buckets:
    """Concatenate buckets in time, merging partial buckets with the same start."""
    d = np.concatenate([np.empty(0), *(p.d for p in buckets)])
    empty = np.empty((0, width))
    tables = [np.vstack((empty, *(getattr(p, name) for p in buckets))) for name in ("count", "mean", "low", "high")]
    merged = Buckets(d, *tables)
    if len(d) < 2 or bool(np.all(np.diff(d) > 0)):
        return merged
    order = np.argsort(d, kind="stable")
    merged = Buckets(d[order], *(t[order] for t in tables))
    first = np.flatnonzero(np.diff(merged.d, prepend=np.nan))
    return _aggregate(first, merged.d[first], merged.count, merged.count, merged.mean, merged.low, merged.high)


def join_columns(buckets: list[Buckets], widths: list[int]) -> Buckets:
    """Join buckets with different columns; columns are missing for buckets that their source lacks."""
    d = np.unique(np.concatenate([p.d for p in buckets]))
    tables = []
    for name, blank in (("count", 0.0), ("mean", np.nan), ("low", np.nan), ("high", np.nan)):
        table = np.full((len(d), sum(widths)), blank)
        offset = 0
        for source, width in zip(buckets, widths, strict=True):
            table[np.searchsorted(d, source.d), offset : offset + width] = getattr(source, name)
            offset += width
        tables.append(table)
    return Buckets(d, *tables)


def buckets_since(buckets: Buckets, d: float) -> Buckets:
    """Return the buckets that start at ``d`` or later."""
    keep = buckets.d >= d
    b = buckets
    return Buckets(b.d[keep], b.count[keep], b.mean[keep], b.low[keep], b.high[keep])


def select_columns(buckets: Buckets, indices: list[int]) -> Buckets:
    """Return the columns ``indices``, in that order."""
    b = buckets
    return Buckets(b.d, b.count[:, indices], b.mean[:, indices], b.low[:, indices], b.high[:, indices])


def rollup_path(folder: Path, step_s: int) -> Path:
    return folder / f"rollup-{step_s}.bin"


def packed_path(folder: Path, step_s: int) -> Path:
    return folder / f"rollup-{step_s}.packed"


def record_type(width: int) -> np.dtype[Any]:
    """Return the type of a bucket's record on disk."""
    return np.dtype([("d", "<f8"), ("count", "<u2", (width,)), *((name, "<f4", (width,)) for name in _STATISTICS)])


def _rounded(values: Table) -> npt.NDArray[np.float32]:
    """Round to 15 bits, a relative precision of 3e-5: lower bits are noise, which does not compress."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    half = np.uint32(1 << (_BITS_DROPPED - 1))
    mask = np.uint32(0xFFFFFFFF << _BITS_DROPPED & 0xFFFFFFFF)
    return np.where(np.isfinite(values), (bits + half) & mask, bits & mask).view("<f4")


def to_records(buckets: Buckets) -> npt.NDArray[Any]:
    records = np.zeros(len(buckets), dtype=record_type(buckets.count.shape[1]))
    records["d"] = buckets.d
    records["count"] = np.minimum(buckets.count, _MAX_COUNT)
    for name in _STATISTICS:
        records[name] = _rounded(getattr(buckets, name))
    return records


def read(folder: Path, step_s: int, width: int, columns: npt.NDArray[np.intp]) -> Buckets:
    """Read selected columns of the stored buckets, except a partial record at the end of the file.

    Args:
        step_s: length of the buckets.
        width: number of columns in the file.
        columns: indices of the columns to read.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if it does not exist.
        ValueError: the file is damaged.
    """
    try:
        data = reading.read_bytes(rollup_path(folder, step_s), limits.MAX_BYTES)
    except FileNotFoundError:
        return _read_packed(packed_path(folder, step_s), width, columns)
    dtype = record_type(width)
    records = np.frombuffer(data, dtype=dtype, count=len(data) // dtype.itemsize)
    # A crashed machine can leave zeros at the end of a file.
    return _buckets_from_records(records[: _count_valid(records["d"])], columns)


def _count_valid(d: npt.NDArray[Any]) -> int:
    """Return the number of leading buckets with valid, ascending times."""
    with np.errstate(invalid="ignore"):
        valid = (d >= 0) & (d <= limits.MAX_SECONDS) & (np.diff(d, prepend=-1.0) > 0)
    return len(d) if valid.all() else int(np.argmin(valid))


def _buckets_from_records(records: npt.NDArray[Any], columns: npt.NDArray[np.intp] | slice) -> Buckets:
    with np.errstate(invalid="ignore"):  # signaling NaNs become quiet ones
        tables = [records[name][:, columns].astype(np.float64) for name in ("count", *_STATISTICS)]
    for table in tables[1:]:
        table[~np.isfinite(table)] = np.nan
    return Buckets(records["d"].astype(np.float64), *tables)


class _Index(msgspec.Struct):
    """First line of a packed file."""

    rows: int  # number of buckets
    sizes: list[int]  # [1 + columns], bytes of ``d`` and of each column


def pack(records: npt.NDArray[Any]) -> bytes:
    """Pack records by column; each is compressed separately so that a report unpacks only the columns it shows."""
    columns = [_byte_shuffle(records["d"])]
    for i in range(records["count"].shape[1]):
        columns.append(b"".join(_byte_shuffle(records[name][:, i]) for name in ("count", *_STATISTICS)))
    compressed = [zlib.compress(piece, 9) for piece in columns]
    index = msgspec.json.encode(_Index(len(records), [len(piece) for piece in compressed]))
    return b"\n".join((index, b"".join(compressed)))


def _byte_shuffle(values: npt.NDArray[Any]) -> bytes:
    """Order the values by byte position: similar bytes next to each other compress better."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1).T.tobytes()


def _read_packed(path: Path, width: int, columns: npt.NDArray[np.intp]) -> Buckets:
    data = reading.read_bytes(path, limits.MAX_BYTES)
    index_line, _, payload = data.partition(b"\n")
    index = schema.decode(index_line, _Index)
    if len(index.sizes) != 1 + width or sum(index.sizes) != len(payload) or min(index.sizes) < 0:
        raise ValueError(f"{path.name} is damaged")
    if not 0 <= index.rows <= limits.MAX_BYTES // 14:
        raise ValueError(f"{path.name} is damaged: {index.rows} rows")
    ends = np.cumsum(index.sizes)
    n = index.rows
    records = np.zeros(n, dtype=record_type(len(columns)))
    records["d"] = _byte_unshuffle(reading.decompress(payload[: ends[0]], 8 * n, zlib.MAX_WBITS), "<f8", n)
    for position, i in enumerate(columns.tolist()):
        column = reading.decompress(payload[ends[i] : ends[i + 1]], 14 * n, zlib.MAX_WBITS)
        records["count"][:, position] = _byte_unshuffle(column[: 2 * n], "<u2", n)
        for k, name in enumerate(_STATISTICS):
            offset = 2 * n + 4 * n * k
            records[name][:, position] = _byte_unshuffle(column[offset : offset + 4 * n], "<f4", n)
    return _buckets_from_records(records[: _count_valid(records["d"])], slice(None))


def _byte_unshuffle(data: bytes, dtype: str, n: int) -> npt.NDArray[Any]:
    return np.ascontiguousarray(np.frombuffer(data, dtype=np.uint8).reshape(-1, n).T).view(dtype).reshape(n)
