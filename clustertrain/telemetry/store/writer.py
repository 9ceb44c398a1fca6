"""Writer of a node's telemetry: ``telemetry/<node>/<k>/``, one segment per start of a sampler.

A segment is a folder claimed with mkdir, so two agents started on a node by mistake never share a file:

- ``header.json``: allocated devices and columns (:class:`Header`).
- ``samples.jsonl.gz``: the samples, append-only (:mod:`.jsonl_blocks`).
- ``rollup-60.bin``, ``rollup-900.bin``: aggregates in buckets (:mod:`.rollup`).
- ``totals.json.gz``: totals by column (:mod:`.totals`).

``d`` is the seconds since the header by the monotonic clock, so steps of the wall clock do not matter. Readers need no
locks while the files grow. After the attempt, :mod:`.compact` replaces the samples with Parquet.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from clustertrain import fsio, reading, schema
from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW, Pace
from clustertrain.telemetry.store import jsonl_blocks, limits, rollup, totals
from clustertrain.telemetry.store.histogram import Column
from clustertrain.telemetry.store.rollup import LEVELS, Buckets

FORMAT = 1
HEADER = "header.json"
Row: TypeAlias = "Column | array[float]"  # of double precision
_MOST_ROWS = 3600  # kept in memory while writing fails
_MOST_REASONS = 10_000
_MOST_BUCKETS = 1440
_MOST_SEGMENTS = 10_000
_BOUNDS = (
    ("t", 0.0, 253_402_300_000.0),  # up to the year 10000, the end of Python's calendar
    ("mono", 0.0, 1e12),
    ("interval_s", 1e-3, 86_400.0),
    ("slow_s", 1e-3, 86_400.0),
)


class GpuFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """An allocated GPU at the start of the segment; ``reason`` says why it could not be opened."""

    uuid: str
    index: int | None = None
    minor: int | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_includes_reserved: bool = False
    parent: str | None = None
    power_limit_w: float | None = None
    reason: str | None = None
    ranks: list[int] = []


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``header.json``."""

    node: str
    t: float  # UTC epoch s at d = 0
    mono: float  # monotonic s at d = 0
    interval_s: float  # between fast samples
    slow_s: float = 10.0  # between slow samples
    gpus: list[GpuFacts] = []  # ``gpus[i]`` is the device ``gpu<i>``
    ranks: list[int] = []  # global ranks of the node
    nvml_error: str | None = None  # why GPUs are not sampled
    driver: str | None = None
    allocation_source: str | None = None  # source of the allocated devices
    cpu_count: int | None = None
    cpu_allocated: int | None = None
    memory_total_bytes: int | None = None
    memory_allocated_bytes: int | None = None
    fast: list[str] = []  # columns (:mod:`.fields`) in the order of the fast samples
    slow: list[str] = []  # columns in the order of the slow samples
    format: int = FORMAT

    def columns(self, pace: Pace) -> list[str]:
        return self.fast if pace == FAST else self.slow

    def paces(self) -> dict[Pace, list[str]]:
        return {FAST: self.fast, SLOW: self.slow}


class Writer:
    """Buffers samples and appends them in batches; a kill loses the samples since the last flush.

    :meth:`fast`, :meth:`slow` and :meth:`null` do no I/O. Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        """Create a writer for the node's ``folder`` (``telemetry/<node>``), which need not exist."""
        self._folder = folder
        self._open_segment: _OpenSegment | None = None

    @property
    def segment(self) -> Path | None:
        """Folder of the segment; None until the first flush claims it."""
        return None if self._open_segment is None else self._open_segment.folder

    def begin(self, header: Header) -> None:
        """Begin a segment, ending an open one first."""
        if self._open_segment is not None:
            with contextlib.suppress(OSError):  # loses only the unwritten samples
                self._open_segment.end(self._open_segment.newest_d, None)
                self._open_segment.flush(sync=True)
            self._open_segment.close()
        self._open_segment = _OpenSegment(self._folder, header)

    def fast(self, d: float, row: Row) -> None:
        """Add a sample at ``d`` s after the header, in the order of ``header.fast``; NaN if missing."""
        self._require_open().add(FAST, d, row)

    def slow(self, d: float, row: Row) -> None:
        """Add a sample in the order of ``header.slow``; see :meth:`fast`."""
        self._require_open().add(SLOW, d, row)

    def null(self, d: float, column: str, reason: str | None) -> None:
        """Record that the column is missing from ``d`` on for ``reason``; None if it is back."""
        self._require_open().null(d, column, reason)

    def flush(self, *, sync: bool = False) -> None:
        """Append the buffered samples, durably with ``sync``.

        Raises:
            OSError: writing failed. At most an hour of samples is kept and written with the next flush.
        """
        if self._open_segment is not None:
            self._open_segment.flush(sync=sync)

    def end(self, d: float, reason: str | None = None) -> None:
        """End the segment at ``d``, with a ``reason`` if the sampler failed; the next flush writes the last totals."""
        if self._open_segment is not None:
            self._open_segment.end(d, reason)

    def close(self) -> None:
        """Flush durably and close.

        Raises:
            OSError: writing failed.
        """
        try:
            self.flush(sync=True)
        finally:
            if self._open_segment is not None:
                self._open_segment.close()
            self._open_segment = None

    def _require_open(self) -> _OpenSegment:
        if self._open_segment is None:
            raise RuntimeError("call begin() before adding samples")
        return self._open_segment


class _PendingRows:
    """Buffered rows of one pace: those of the next flush, and those of the open bucket."""

    def __init__(self, pace: Pace, columns: list[str]) -> None:
        self.pace, self.columns = pace, columns
        self.scale = np.array([fields.scale(c) for c in columns])
        self.d: list[float] = []
        self.rows: list[bytes] = []
        self.bucket_d: list[float] = []
        self.bucket: list[bytes] = []

    def add(self, d: float, row: Row) -> None:
        # Only this at each tick: a thread that wakes once per second finds all caches cold.
        row_bytes = row.tobytes()
        self.d.append(d)
        self.rows.append(row_bytes)
        self.bucket_d.append(d)
        self.bucket.append(row_bytes)
        if len(self.d) > _MOST_ROWS:  # a full disk must not exhaust the node's memory
            del self.d[0], self.rows[0]

    def to_block(self) -> jsonl_blocks.SampleBlock:
        return jsonl_blocks.build_block(self.pace, self.d, self._rounded(self.rows))

    def take_bucket(self) -> tuple[Column, rollup.Table]:
        d, rows = np.array(self.bucket_d), self._rounded(self.bucket)
        self.bucket_d, self.bucket = [], []
        return d, rows

    def _rounded(self, rows: list[bytes]) -> rollup.Table:
        values = np.frombuffer(b"".join(rows), dtype=np.float64).reshape(len(rows), len(self.columns))
        table: rollup.Table = np.rint(values * self.scale) / self.scale
        table[~np.isfinite(table)] = np.nan
        return table


class _OpenSegment:
    """A segment that is being written."""

    def __init__(self, node_folder: Path, header: Header) -> None:
        self._node_folder, self._header = node_folder, header
        self.folder: Path | None = None
        self.newest_d = 0.0
        self._header_written = False
        self._pending = {pace: _PendingRows(pace, columns) for pace, columns in header.paces().items()}
        self._width = len(header.fast) + len(header.slow)
        self._pending_notes: list[jsonl_blocks.Record] = []
        self._reasons: dict[str, str] = {}
        self._accumulator = totals.TotalsAccumulator(header)
        self._totals_due = True
        self._end: jsonl_blocks.SegmentEnd | None = None
        self._bucket_index = 0  # index of the open bucket of the finest level
        self._minute_buckets: list[Buckets] = []  # of the open bucket of the coarsest level
        self._pending_records: dict[int, list[bytes]] = {step: [] for step in LEVELS}
        self._files: dict[str, _AppendOnlyFile] = {}

    def add(self, pace: Pace, d: float, row: Row) -> None:
        if len(row) != len(self._pending[pace].columns):
            raise ValueError(f"{len(row)} values for {len(self._pending[pace].columns)} columns ({pace})")
        d = self._clamp_time(d)
        if int(d // LEVELS[0]) > self._bucket_index:
            self._close_bucket()
            self._bucket_index = int(d // LEVELS[0])
        self._pending[pace].add(d, row)

    def null(self, d: float, column: str, reason: str | None) -> None:
        if reason is not None:
            self._reasons[column] = reason
        if len(self._pending_notes) < _MOST_REASONS:
            self._pending_notes.append(jsonl_blocks.MissingReason(self._clamp_time(d), column, reason))

    def end(self, d: float, reason: str | None) -> None:
        if self._end is not None:
            return
        self._close_bucket()
        self._close_coarse_bucket()
        self._end = jsonl_blocks.SegmentEnd(self._clamp_time(d), reason)
        self._pending_notes.append(self._end)

    def flush(self, *, sync: bool) -> None:
        folder = self._claim()
        records: list[jsonl_blocks.Record] = [p.to_block() for p in self._pending.values() if p.d]
        records += self._pending_notes
        if records:
            self._append(folder / jsonl_blocks.NAME, jsonl_blocks.encode_member(records), sync=sync)
            for p in self._pending.values():
                p.d, p.rows = [], []
            self._pending_notes = []
        for step, pending in self._pending_records.items():
            if pending:
                self._append(rollup.rollup_path(folder, step), b"".join(pending), sync=sync)
                pending.clear()
        if self._totals_due:
            _replace_file(folder / totals.NAME, totals.dump(self._build_totals()))
            self._totals_due = False

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _clamp_time(self, d: float) -> float:
        # Never before the open bucket: the roll-ups must contain exactly the samples before it.
        d = max(round(float(d), 3), float(self._bucket_index * LEVELS[0]))
        self.newest_d = max(d, self.newest_d)
        return d

    def _close_bucket(self) -> None:
        """Aggregate the open bucket of the finest level."""
        buckets = []
        for p in self._pending.values():
            d, rows = p.take_bucket()
            buckets.append(rollup.build_buckets(self._accumulator.add(p.pace, d, rows), LEVELS[0]))
        minute = rollup.join_columns(buckets, [len(p.columns) for p in self._pending.values()])
        if not len(minute):
            return
        self._totals_due = True
        if self._minute_buckets and minute.d[0] // LEVELS[1] > self._minute_buckets[0].d[0] // LEVELS[1]:
            self._close_coarse_bucket()
        self._minute_buckets.append(minute)
        self._queue_buckets(LEVELS[0], minute)

    def _close_coarse_bucket(self) -> None:
        if self._minute_buckets:
            self._queue_buckets(
                LEVELS[1], rollup.coarsen(rollup.concat_buckets(self._minute_buckets, self._width), LEVELS[1])
            )
            self._minute_buckets = []

    def _queue_buckets(self, step: int, buckets: Buckets) -> None:
        self._pending_records[step].append(rollup.to_records(buckets).tobytes())
        del self._pending_records[step][:-_MOST_BUCKETS]

    def _build_totals(self) -> totals.SegmentTotals:
        d = float(self._bucket_index * LEVELS[0])
        sums = self._accumulator.build_totals(d, self._reasons)
        if self._end is not None:
            sums.is_final, sums.end, sums.failure = True, self._end.d, self._end.reason
        return sums

    def _claim(self) -> Path:
        if self.folder is None:
            self.folder = claim_segment(self._node_folder)
        if not self._header_written:
            fsio.write_bytes(self.folder / HEADER, msgspec.json.encode(self._header) + b"\n")
            self._header_written = True
        return self.folder

    def _append(self, path: Path, data: bytes, *, sync: bool) -> None:
        if path.name not in self._files:
            self._files[path.name] = _AppendOnlyFile(path)
        self._files[path.name].append(data, sync=sync)


def claim_segment(node_folder: Path) -> Path:
    """Create the folder of a new segment, exclusively.

    Raises:
        OSError: the folder cannot be created.
    """
    fsio.make_folder(node_folder)
    for k in range(_MOST_SEGMENTS):
        if fsio.claim_folder(node_folder / str(k)):
            return node_folder / str(k)
    raise OSError(f"{node_folder}: too many segments: {_MOST_SEGMENTS}")


class _AppendOnlyFile:
    """File that grows by complete pieces; the next append overwrites a partially written piece."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        self._size = 0

    def append(self, data: bytes, *, sync: bool) -> None:
        offset, remaining = self._size, memoryview(data)
        try:
            while remaining:
                written = os.pwrite(self._fd, remaining, offset)
                offset, remaining = offset + written, remaining[written:]
            if sync:
                os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):  # readers also skip a partial piece
                os.ftruncate(self._fd, self._size)
            raise
        self._size = offset

    def close(self) -> None:
        os.close(self._fd)


def _replace_file(path: Path, data: bytes) -> None:
    """Replace a file without fsync: readers do without a file damaged by a machine crash."""
    temp_path = path.with_name(f".{path.name}")  # a leftover of a killed process is overwritten
    try:
        with open(temp_path, "wb", opener=lambda name, flags: os.open(name, flags, 0o640)) as f:
            f.write(data)
        temp_path.replace(path)
    except OSError:
        temp_path.unlink(missing_ok=True)
        raise


def read_header(folder: Path) -> Header:
    """Read the header of a segment.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if it does not exist.
        ValueError: the file is damaged.
    """
    header = schema.decode(reading.read_bytes(folder / HEADER, limits.MAX_BYTES), Header)
    for name, low, high in _BOUNDS:
        if not limits.is_within(getattr(header, name), low, high):
            raise ValueError(f"{HEADER} is damaged: {name} is {getattr(header, name):g}, not {low:g} to {high:g}")
    if any(not 0 <= rank < limits.MAX_RANKS for rank in (*header.ranks, *(r for g in header.gpus for r in g.ranks))):
        raise ValueError(f"{HEADER} is damaged: a rank is out of range")
    columns = header.fast + header.slow
    if len(set(columns)) < len(columns):
        raise ValueError(f"{HEADER} is damaged: a column occurs twice")
    return header


def find_unknown_columns(header: Header) -> list[str]:
    """Return the columns with an unknown field or device, from a later version or because of damage."""
    devices = {f"gpu{i}" for i in range(len(header.gpus))} | {f"rank{r}" for r in header.ranks} | {"host"}
    return [
        c for c in header.fast + header.slow if fields.find_field(c) is None or fields.split_column(c)[0] not in devices
    ]
