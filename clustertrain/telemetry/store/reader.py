"""Reader of a node's segments by column: of a running, a killed or a compacted one.

Missing values are NaN, times are UTC epoch s. Damage stays local: a segment that cannot be read is empty and gives the
reason in ``read_error``; other segments are not affected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from clustertrain import reading
from clustertrain.telemetry.fields import FAST, SLOW, Pace
from clustertrain.telemetry.store import jsonl_blocks, parquet, rollup, writer
from clustertrain.telemetry.store.histogram import Column
from clustertrain.telemetry.store.rollup import LEVELS, Buckets, Table
from clustertrain.telemetry.store.totals import SegmentTotals, Total, TotalsAccumulator, load_totals, totals_by_column
from clustertrain.telemetry.store.writer import Header

_LEAD_INTERVALS = 5  # intervals read before the requested time, for the first difference of a counter


@dataclass(frozen=True)
class Frame:
    """Samples of one pace."""

    t: Column  # [n], UTC epoch s
    values: dict[str, Column]  # [n] by column

    def __len__(self) -> int:
        return len(self.t)


@dataclass(frozen=True)
class Rollup:
    """Buckets of ``step_s``, without empty ones. Tables are [n, columns], NaN where the count is 0.

    Counters are rates per second.
    """

    t: Column  # [n], start of each bucket
    step_s: float
    columns: list[str]
    count: Table
    mean: Table
    low: Table
    high: Table

    def __len__(self) -> int:
        return len(self.t)


@dataclass
class _Rows:
    d: Column
    rows: Table


@dataclass
class _Tail:
    """Records after the totals: rows of all columns, and the notes between them."""

    paces: dict[Pace, _Rows]
    reasons: dict[str, str] = field(default_factory=dict)
    end: jsonl_blocks.SegmentEnd | None = None


class RecordedSegment:
    """One recorded segment of a node. Read errors are not raised but stored in ``read_error``."""

    def __init__(self, folder: Path, header: Header, read_error: str | None = None) -> None:
        """Create a segment; ``read_error`` says why it, or a part of it, cannot be read."""
        self.folder, self.header, self.read_error = folder, header, read_error
        self.unknown_columns = frozenset[str]()  # columns left out of reports
        self._has_no_header = math.isnan(header.t)  # without a header, no file of the segment can be interpreted

    @property
    def sample_count(self) -> int:
        """Number of samples of the fast pace."""
        before = self._sums.samples if self._sums is not None else 0
        return before + len(self._tail.paces[FAST].d)

    @property
    def newest_d(self) -> float | None:
        """Seconds from the header to the newest sample; None without samples."""
        newest = [float(part.d[-1]) for part in self._tail.paces.values() if len(part.d)]
        if self._sums is not None and self._sums.last_sample_d is not None:
            newest.append(self._sums.last_sample_d)
        return max(newest, default=None)

    @property
    def newest_t(self) -> float | None:
        """Time of the newest sample; None without samples."""
        return None if self.newest_d is None else self.header.t + self.newest_d

    @property
    def end(self) -> float | None:
        """Time at which the sampler stopped; None if it runs or was killed."""
        d = self._tail.end.d if self._tail.end is not None else self._sums.end if self._sums is not None else None
        return None if d is None else self.header.t + d

    @property
    def failure(self) -> str | None:
        """Reason why the sampler stopped, unless it was asked to."""
        if self._tail.end is not None:
            return self._tail.end.reason
        return None if self._sums is None else self._sums.failure

    def samples(
        self,
        pace: Pace,
        columns: Sequence[str] | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> Frame:
        """Read samples with ``since <= t < until`` (UTC s); columns that the segment lacks are left out."""
        selected = self._select_columns(self.header.columns(pace), columns)
        low = -math.inf if since is None else since - self.header.t
        high = math.inf if until is None else until - self.header.t
        rows = _Rows(np.empty(0), np.empty((0, len(selected))))
        with self._recording_read_errors("samples"):
            rows = self._read_rows(pace, selected, low, high)
        expected = self._sums.samples if self._sums is not None else 0
        if pace == FAST and since is None and until is None and len(rows.d) < expected:
            self.read_error = (
                f"{self.folder}: samples: truncated or damaged, only {len(rows.d):,} of {expected:,} readable"
            )
        return Frame(self.header.t + rows.d, {c: rows.rows[:, i] for i, c in enumerate(selected)})

    def rollup(self, step_s: float, columns: Sequence[str] | None = None) -> Rollup:
        """Return the segment in buckets of ``step_s``, aligned to its start; fast for multiples of ``LEVELS``.

        Columns that the segment lacks are left out.
        """
        selected = self._select_columns(self.header.fast + self.header.slow, columns)
        buckets = rollup.concat_buckets([], len(selected))
        with self._recording_read_errors("roll-ups"):
            buckets = buckets if self._has_no_header else self._read_buckets(step_s, selected)
        return Rollup(
            self.header.t + buckets.d, step_s, selected, buckets.count, buckets.mean, buckets.low, buckets.high
        )

    def totals(self) -> dict[str, Total]:
        """Return the totals by column."""
        return {c: total for c, total in totals_by_column(self.sums()).items() if c not in self.unknown_columns}

    def sums(self) -> SegmentTotals:
        """Return the totals of the whole segment in the file's format."""
        tail = self._tail.paces
        if self._sums is not None and not any(len(part.d) for part in tail.values()):
            sums = msgspec.structs.replace(self._sums)
        else:
            adder = TotalsAccumulator(self.header, self._sums)
            for pace, rows in tail.items():
                adder.add(pace, rows.d, rows.rows)
            sums = adder.build_totals(0.0 if adder.last_sample_d is None else adder.last_sample_d, {})
        sums.reasons = self.reasons()
        sums.end, sums.failure = None if self.end is None else self.end - self.header.t, self.failure
        return sums

    def newest(self) -> dict[str, float]:
        """Return the last sample of each pace by column, NaN if missing; empty without samples."""
        newest: dict[str, float] = {}
        if self._sums is not None and self._sums.samples:
            values = (math.nan if v is None else v for v in self._sums.newest)
            newest = dict(zip(self._sums.columns, values, strict=True))
        for pace, rows in self._tail.paces.items():
            if len(rows.d):
                newest |= dict(zip(self.header.columns(pace), rows.rows[-1].tolist(), strict=True))
        return {c: value for c, value in newest.items() if c not in self.unknown_columns}

    def reasons(self) -> dict[str, str]:
        """Return the last reason for a missing value by column, even if the value returned since."""
        return (self._sums.reasons if self._sums is not None else {}) | self._tail.reasons

    def _select_columns(self, available: list[str], columns: Sequence[str] | None) -> list[str]:
        """Return the available and known ones of ``columns`` (default: all), in the order of the file."""
        requested = set(available if columns is None else columns) - self.unknown_columns
        return [c for c in available if c in requested]

    @cached_property
    def _sums(self) -> SegmentTotals | None:
        with self._recording_read_errors("totals"):
            sums = None if self._has_no_header else load_totals(self.folder)
            if sums is not None and sums.columns == self.header.fast + self.header.slow:
                return sums
        return None

    @cached_property
    def _tail(self) -> _Tail:
        """Records that the totals do not include yet."""
        paces = self.header.paces().items()
        tail = _Tail({pace: _Rows(np.empty(0), np.empty((0, len(columns)))) for pace, columns in paces})
        since = 0.0 if self._sums is None else self._sums.counted_until_d
        if self._has_no_header or (self._sums is not None and self._sums.is_final):
            return tail
        with self._recording_read_errors("samples"):
            try:
                records = self._records_since(since)
            except FileNotFoundError:  # compacted with damaged totals, or nothing was written
                tail.paces = {pace: self._read_rows(pace, columns, since, math.inf) for pace, columns in paces}
                tail.reasons = parquet.read_reasons(self.folder)
                return tail
            if self._sums is None and not records and not jsonl_blocks.is_empty_or_gzip(self.folder):
                self.read_error = f"{self.folder}: samples: damaged"
            for pace, columns in paces:
                tail.paces[pace] = _rows_from_records(records, pace, list(range(len(columns))), since, math.inf)
            for record in records:
                if isinstance(record, jsonl_blocks.MissingReason) and record.reason is not None:
                    tail.reasons[record.column] = record.reason
                elif isinstance(record, jsonl_blocks.SegmentEnd):
                    tail.end = record
        return tail

    def _read_rows(self, pace: Pace, columns: list[str], low: float, high: float) -> _Rows:
        all_columns = self.header.columns(pace)
        indices = [all_columns.index(c) for c in columns]
        if self._has_no_header:
            return _Rows(np.empty(0), np.empty((0, len(columns))))
        try:
            records = jsonl_blocks.read(self.folder) if low <= 0 else self._records_since(low)
            return _rows_from_records(records, pace, indices, low, high)
        except FileNotFoundError:
            pass
        try:
            return _Rows(*parquet.read(self.folder, pace, columns, low, high))
        except FileNotFoundError:  # killed before the first flush
            return _Rows(np.empty(0), np.empty((0, len(columns))))

    def _records_since(self, since: float) -> list[jsonl_blocks.Record]:
        """Read the file from its end back to ``since``; the result includes some earlier records."""
        members = []
        for records in jsonl_blocks.read_backwards(self.folder):
            members.append(records)
            newest = max((r.d[-1] for r in records if isinstance(r, jsonl_blocks.SampleBlock)), default=math.inf)
            if newest < since:
                break
        return [record for records in reversed(members) for record in records]

    def _read_buckets(self, step_s: float, columns: list[str]) -> Buckets:
        base_level = next((level for level in reversed(LEVELS) if step_s % level == 0), None)
        if base_level is None:
            return self._buckets_from_samples(step_s, columns, 0.0)
        stored = self._stored_buckets(base_level, columns)
        if self._sums is None or not self._sums.is_final:
            since = float(stored.d[-1]) + base_level if len(stored) else 0.0
            if base_level == LEVELS[0]:
                remaining = self._buckets_from_samples(base_level, columns, since)
            else:
                minute_buckets = self._read_buckets(LEVELS[0], columns)
                remaining = rollup.coarsen(rollup.buckets_since(minute_buckets, since), base_level)
            stored = rollup.concat_buckets([stored, remaining], len(columns))
        return stored if step_s == base_level else rollup.coarsen(stored, step_s)

    def _stored_buckets(self, step_s: int, columns: list[str]) -> Buckets:
        all_columns = self.header.fast + self.header.slow
        index_by_column = {c: i for i, c in enumerate(all_columns)}
        indices = np.array([index_by_column[c] for c in columns], dtype=np.intp)
        try:
            return rollup.read(self.folder, step_s, len(all_columns), indices)
        except FileNotFoundError:
            return rollup.concat_buckets([], len(columns))

    def _buckets_from_samples(self, step_s: float, columns: list[str], since: float) -> Buckets:
        """Compute buckets that start at ``since`` or later from the samples."""
        buckets, widths, names = [], [], []
        for pace, interval_s in ((FAST, self.header.interval_s), (SLOW, self.header.slow_s)):
            selected = [c for c in self.header.columns(pace) if c in set(columns)]
            rows = self._read_rows(pace, selected, since - _LEAD_INTERVALS * interval_s, math.inf)
            prepared = rollup.CounterDifferencer(selected).prepare(rows.d, rows.rows)
            buckets.append(rollup.buckets_since(rollup.build_buckets(prepared, step_s), since))
            widths.append(len(selected))
            names += selected
        combined = rollup.join_columns(buckets, widths)
        return rollup.select_columns(combined, [names.index(c) for c in columns])

    @contextmanager
    def _recording_read_errors(self, source: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as e:
            self.read_error = f"{self.folder}: {source}: {_describe_error(e)}"


def _rows_from_records(
    records: Iterable[jsonl_blocks.Record], pace: Pace, indices: list[int], low: float, high: float
) -> _Rows:
    ds, tables = [np.empty(0)], [np.empty((0, len(indices)))]
    newest = -math.inf
    for record in records:
        if not isinstance(record, jsonl_blocks.SampleBlock) or record.pace != pace:
            continue
        d = np.array(record.d)
        keep = (d >= low) & (d < high) & (d > newest)
        if keep.any():
            ds.append(d[keep])
            newest = float(ds[-1][-1])
            tables.append(jsonl_blocks.decode_block(record, indices)[keep])
    return _Rows(np.concatenate(ds), np.concatenate(tables))


def open_node(folder: Path) -> list[RecordedSegment]:
    """Open the segments of a node's folder (``attempts/<n>/telemetry/<node>``), oldest first.

    A missing folder has no segments. An unreadable segment is included with its ``read_error`` and without samples.
    """
    try:
        names = [p.name for p in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as e:
        return [_unreadable_segment(folder, folder.name, e)]
    return [
        _open_segment(folder / str(k), folder.name)
        for k in sorted(int(name) for name in names if reading.is_unsigned_int(name))
    ]


def _open_segment(folder: Path, node: str) -> RecordedSegment:
    try:
        header = writer.read_header(folder)
    except (OSError, ValueError) as e:
        return _unreadable_segment(folder, node, e)
    if header.format > writer.FORMAT:
        return _unreadable_segment(folder, node, ValueError(f"written by a newer version (format {header.format})"))
    segment = RecordedSegment(folder, header)
    if unknown := writer.find_unknown_columns(header):
        segment.unknown_columns = frozenset(unknown)
        segment.read_error = f"{folder}: unknown columns left out: {', '.join(unknown)}"
    return segment


def _unreadable_segment(folder: Path, node: str, e: Exception) -> RecordedSegment:
    return RecordedSegment(
        folder, Header(node=node, t=math.nan, mono=math.nan, interval_s=math.nan), f"{folder}: {_describe_error(e)}"
    )


def _describe_error(e: Exception) -> str:
    match e:
        case PermissionError():
            return "this user may not read it"
        case FileNotFoundError():
            return "no header: the sampler has just started, or was killed at once"
        case msgspec.DecodeError():
            return f"damaged: {e}"
        case OSError():
            return e.strerror or str(e)
    return str(e)


def find_overlapping(segments: Sequence[RecordedSegment]) -> list[tuple[RecordedSegment, RecordedSegment]]:
    """Return pairs of a node's segments written at the same time, by two agents that were started by mistake.

    Times are compared by the monotonic clock because the wall clock may have been set back in between.
    """
    spans = [(s.header.mono, s.header.mono + s.newest_d, s) for s in segments if s.newest_d is not None]
    spans.sort(key=lambda span: span[0])
    return [(a, b) for i, (_, end, a) in enumerate(spans) for start, _, b in spans[i + 1 :] if start < end]


def drop_overlapping(segments: Sequence[RecordedSegment]) -> list[RecordedSegment]:
    """Return the segments without overlaps, keeping the longest of those written at the same time."""
    if len(segments) < 2:
        return list(segments)
    conflicts: dict[int, set[int]] = {}
    for a, b in find_overlapping(segments):
        conflicts.setdefault(id(a), set()).add(id(b))
        conflicts.setdefault(id(b), set()).add(id(a))
    selected: set[int] = set()
    for segment in sorted(segments, key=lambda s: -(s.newest_d or 0.0)):
        if not conflicts.get(id(segment), set()) & selected:
            selected.add(id(segment))
    return [s for s in segments if id(s) in selected]
