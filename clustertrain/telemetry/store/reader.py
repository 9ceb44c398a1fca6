"""Reads what a node recorded, segment by segment, as columns: live, after a kill, or compacted.

Missing values are NaN, times are UTC epoch s. Damage costs what is damaged: a segment that cannot be read says why in
``trouble`` and is empty, others are not touched by it.
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
from clustertrain.telemetry.store.totals import Adder, Sums, Total, load, totals_of
from clustertrain.telemetry.store.writer import Header

_SLACK = 5  # intervals before what is asked for, so that the first difference of a counter is known


@dataclass(frozen=True)
class Frame:
    """Samples of one pace: ``t`` [n] and by column n values."""

    t: Column
    values: dict[str, Column]

    def __len__(self) -> int:
        return len(self.t)


@dataclass(frozen=True)
class Rollup:
    """Buckets of ``step_s``: ``t`` [n] where each begins; ``count``, ``mean``, ``low``, ``high`` [n, columns], NaN
    where the count is 0. Counters are rates per second. Buckets without a sample are left out."""

    t: Column
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
    """What was recorded from ``d`` on: rows by pace, all columns, and the notes between them."""

    paces: dict[Pace, _Rows]
    reasons: dict[str, str] = field(default_factory=dict)
    end: jsonl_blocks.End | None = None


class Segment:
    """One segment of a node. Nothing here raises OSError: see ``trouble``."""

    def __init__(self, folder: Path, header: Header, trouble: str | None = None) -> None:
        """``trouble``: why it, or a part of it, could not be read."""
        self.folder, self.header, self.trouble = folder, header, trouble
        self.unknown = frozenset[str]()  # columns that reports leave out
        self._blank = math.isnan(header.t)  # no header could be read, and without it nothing means anything

    @property
    def n(self) -> int:
        """How many samples of the fast pace there are."""
        before = self._sums.n if self._sums is not None else 0
        return before + len(self._tail.paces[FAST].d)

    @property
    def newest_d(self) -> float | None:
        """The newest sample's seconds after the header; None where there is none."""
        found = [float(part.d[-1]) for part in self._tail.paces.values() if len(part.d)]
        if self._sums is not None and self._sums.upto is not None:
            found.append(self._sums.upto)
        return max(found, default=None)

    @property
    def newest_t(self) -> float | None:
        """When the newest sample was taken; None where there is none."""
        return None if self.newest_d is None else self.header.t + self.newest_d

    @property
    def end(self) -> float | None:
        """When the sampler stopped; None where it did not say so: it runs, or was killed."""
        d = self._tail.end.d if self._tail.end is not None else self._sums.end if self._sums is not None else None
        return None if d is None else self.header.t + d

    @property
    def failure(self) -> str | None:
        """Why it stopped, where nobody told it to."""
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
        """The samples from ``since`` until before ``until`` (UTC s). Columns that the segment lacks are left out."""
        wanted = self._wanted(self.header.columns(pace), columns)
        low = -math.inf if since is None else since - self.header.t
        high = math.inf if until is None else until - self.header.t
        part = _Rows(np.empty(0), np.empty((0, len(wanted))))
        with self._guarded("samples"):
            part = self._rows(pace, wanted, low, high)
        counted = self._sums.n if self._sums is not None else 0
        if pace == FAST and since is None and until is None and len(part.d) < counted:
            self.trouble = f"{self.folder}: samples: cut short or damaged, {len(part.d):,} of {counted:,} are left"
        return Frame(self.header.t + part.d, {c: part.rows[:, i] for i, c in enumerate(wanted)})

    def rollup(self, step_s: float, columns: Sequence[str] | None = None) -> Rollup:
        """The segment in buckets of ``step_s``, aligned to the segment's beginning; quick for multiples of ``LEVELS``.
        Columns that the segment lacks are left out."""
        wanted = self._wanted(self.header.fast + self.header.slow, columns)
        found = rollup.joined([], len(wanted))
        with self._guarded("roll-ups"):
            found = found if self._blank else self._buckets(step_s, wanted)
        return Rollup(self.header.t + found.d, step_s, wanted, found.count, found.mean, found.low, found.high)

    def totals(self) -> dict[str, Total]:
        """What each column adds up to."""
        return {c: total for c, total in totals_of(self.sums()).items() if c not in self.unknown}

    def sums(self) -> Sums:
        """As :meth:`totals`, as it is in the file."""
        tail = self._tail.paces
        if self._sums is not None and not any(len(part.d) for part in tail.values()):
            sums = msgspec.structs.replace(self._sums)
        else:
            adder = Adder(self.header, self._sums)
            for pace, part in tail.items():
                adder.add(pace, part.d, part.rows)
            sums = adder.sums(0.0 if adder.upto is None else adder.upto, {})
        sums.reasons = self.reasons()
        sums.end, sums.failure = None if self.end is None else self.end - self.header.t, self.failure
        return sums

    def newest(self) -> dict[str, float]:
        """The last sample of each pace by column, NaN where missing; empty where there is none."""
        found: dict[str, float] = {}
        if self._sums is not None and self._sums.n:
            values = (math.nan if v is None else v for v in self._sums.newest)
            found = dict(zip(self._sums.columns, values, strict=True))
        for pace, part in self._tail.paces.items():
            if len(part.d):
                found |= dict(zip(self.header.columns(pace), part.rows[-1].tolist(), strict=True))
        return {c: value for c, value in found.items() if c not in self.unknown}

    def reasons(self) -> dict[str, str]:
        """The last reason for a missing value of each column, also where it came back."""
        return (self._sums.reasons if self._sums is not None else {}) | self._tail.reasons

    def _wanted(self, there: list[str], columns: Sequence[str] | None) -> list[str]:
        """Those of ``columns`` (None: all) that are there and known, in the order of the file."""
        wanted = set(there if columns is None else columns) - self.unknown
        return [c for c in there if c in wanted]

    @cached_property
    def _sums(self) -> Sums | None:
        with self._guarded("totals"):
            sums = None if self._blank else load(self.folder)
            if sums is not None and sums.columns == self.header.fast + self.header.slow:
                return sums
        return None

    @cached_property
    def _tail(self) -> _Tail:
        """What the totals do not have yet."""
        paces = self.header.paces().items()
        tail = _Tail({pace: _Rows(np.empty(0), np.empty((0, len(columns)))) for pace, columns in paces})
        since = 0.0 if self._sums is None else self._sums.d
        if self._blank or (self._sums is not None and self._sums.complete):
            return tail
        with self._guarded("samples"):
            try:
                records = self._records(since)
            except FileNotFoundError:  # compacted, and the totals are damaged; or nothing was written
                tail.paces = {pace: self._rows(pace, columns, since, math.inf) for pace, columns in paces}
                tail.reasons = parquet.reasons(self.folder)
                return tail
            if self._sums is None and not records and not jsonl_blocks.is_begun(self.folder):
                self.trouble = f"{self.folder}: samples: damaged"
            for pace, columns in paces:
                tail.paces[pace] = _rows_of(records, pace, list(range(len(columns))), since, math.inf)
            for record in records:
                if isinstance(record, jsonl_blocks.Reason) and record.reason is not None:
                    tail.reasons[record.column] = record.reason
                elif isinstance(record, jsonl_blocks.End):
                    tail.end = record
        return tail

    def _rows(self, pace: Pace, columns: list[str], low: float, high: float) -> _Rows:
        every = self.header.columns(pace)
        at = [every.index(c) for c in columns]
        if self._blank:
            return _Rows(np.empty(0), np.empty((0, len(columns))))
        try:
            records = jsonl_blocks.read(self.folder) if low <= 0 else self._records(low)
            return _rows_of(records, pace, at, low, high)
        except FileNotFoundError:
            pass
        try:
            return _Rows(*parquet.read(self.folder, pace, columns, low, high))
        except FileNotFoundError:  # killed before the first flush
            return _Rows(np.empty(0), np.empty((0, len(columns))))

    def _records(self, since: float) -> list[jsonl_blocks.Record]:
        """All records from ``since`` on, and some before, read from the file's end."""
        members = []
        for records in jsonl_blocks.read_backwards(self.folder):
            members.append(records)
            newest = max((r.d[-1] for r in records if isinstance(r, jsonl_blocks.Block)), default=math.inf)
            if newest < since:
                break
        return [record for records in reversed(members) for record in records]

    def _buckets(self, step_s: float, columns: list[str]) -> Buckets:
        base = next((level for level in reversed(LEVELS) if step_s % level == 0), None)
        if base is None:
            return self._summed(step_s, columns, 0.0)
        found = self._stored(base, columns)
        if self._sums is None or not self._sums.complete:
            since = float(found.d[-1]) + base if len(found) else 0.0
            if base == LEVELS[0]:
                rest = self._summed(base, columns, since)
            else:
                fine = self._buckets(LEVELS[0], columns)
                rest = rollup.coarser(rollup.since(fine, since), base)
            found = rollup.joined([found, rest], len(columns))
        return found if step_s == base else rollup.coarser(found, step_s)

    def _stored(self, step_s: int, columns: list[str]) -> Buckets:
        every = self.header.fast + self.header.slow
        where = {c: i for i, c in enumerate(every)}
        at = np.array([where[c] for c in columns], dtype=np.intp)
        try:
            return rollup.read(self.folder, step_s, len(every), at)
        except FileNotFoundError:
            return rollup.joined([], len(columns))

    def _summed(self, step_s: float, columns: list[str], since: float) -> Buckets:
        """Buckets from the samples, from ``since`` on."""
        parts, widths, names = [], [], []
        for pace, interval_s in ((FAST, self.header.interval_s), (SLOW, self.header.slow_s)):
            wanted = [c for c in self.header.columns(pace) if c in set(columns)]
            part = self._rows(pace, wanted, since - _SLACK * interval_s, math.inf)
            figures = rollup.Differences(wanted).figures(part.d, part.rows)
            parts.append(rollup.since(rollup.bucketed(figures, step_s), since))
            widths.append(len(wanted))
            names += wanted
        whole = rollup.beside(parts, widths)
        return rollup.chosen(whole, [names.index(c) for c in columns])

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as e:
            self.trouble = f"{self.folder}: {what}: {_why(e)}"


def _rows_of(records: Iterable[jsonl_blocks.Record], pace: Pace, at: list[int], low: float, high: float) -> _Rows:
    ds, tables = [np.empty(0)], [np.empty((0, len(at)))]
    newest = -math.inf
    for record in records:
        if not isinstance(record, jsonl_blocks.Block) or record.pace != pace:
            continue
        d = np.array(record.d)
        keep = (d >= low) & (d < high) & (d > newest)
        if keep.any():
            ds.append(d[keep])
            newest = float(ds[-1][-1])
            tables.append(jsonl_blocks.table(record, at)[keep])
    return _Rows(np.concatenate(ds), np.concatenate(tables))


def open_node(folder: Path) -> list[Segment]:
    """The segments of a node and attempt (``attempts/<n>/telemetry/<node>``) in the order in which they began; none
    where there is no such folder. What cannot be read is there with its ``trouble`` and without samples."""
    try:
        names = [p.name for p in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as e:
        return [_unreadable(folder, folder.name, e)]
    return [_open(folder / str(k), folder.name) for k in sorted(int(name) for name in names if reading.is_count(name))]


def _open(folder: Path, node: str) -> Segment:
    try:
        header = writer.read_header(folder)
    except (OSError, ValueError) as e:
        return _unreadable(folder, node, e)
    if header.format > writer.FORMAT:
        return _unreadable(folder, node, ValueError(f"written by a later version (format {header.format})"))
    segment = Segment(folder, header)
    if unknown := writer.unknown_columns(header):
        segment.unknown = frozenset(unknown)
        segment.trouble = f"{folder}: left out columns that are not known here: {', '.join(unknown)}"
    return segment


def _unreadable(folder: Path, node: str, e: Exception) -> Segment:
    return Segment(folder, Header(node=node, t=math.nan, mono=math.nan, interval_s=math.nan), f"{folder}: {_why(e)}")


def _why(e: Exception) -> str:
    match e:
        case PermissionError():
            return "this user may not read it"
        case FileNotFoundError():
            return "has no header: its sampler has just begun, or was killed at once"
        case msgspec.DecodeError():
            return f"damaged: {e}"
        case OSError():
            return e.strerror or str(e)
    return str(e)


def overlapping(segments: Sequence[Segment]) -> list[tuple[Segment, Segment]]:
    """Pairs of a node's segments that were written at the same time: two agents by mistake.

    By the monotonic clock: the wall clock may have been set back between one and the next.
    """
    spans = [(s.header.mono, s.header.mono + s.newest_d, s) for s in segments if s.newest_d is not None]
    spans.sort(key=lambda span: span[0])
    return [(a, b) for i, (_, end, a) in enumerate(spans) for start, _, b in spans[i + 1 :] if start < end]


def one_at_a_time(segments: Sequence[Segment]) -> list[Segment]:
    """Those that count where two agents recorded a node: of segments written at the same time the longest."""
    if len(segments) < 2:
        return list(segments)
    clashes: dict[int, set[int]] = {}
    for a, b in overlapping(segments):
        clashes.setdefault(id(a), set()).add(id(b))
        clashes.setdefault(id(b), set()).add(id(a))
    kept: set[int] = set()
    for segment in sorted(segments, key=lambda s: -(s.newest_d or 0.0)):
        if not clashes.get(id(segment), set()) & kept:
            kept.add(id(segment))
    return [s for s in segments if id(s) in kept]
