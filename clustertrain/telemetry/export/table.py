"""All samples of a run as one table in CSV or Parquet: one row per time and device, one column per field.

The table is written in pieces, so a week of a thousand GPUs takes no more memory than an hour of eight.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clustertrain import fsio
from clustertrain.errors import ConfigError, UsageError
from clustertrain.printable import printable, unwrap_stream
from clustertrain.run.heartbeat import PHASES
from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW
from clustertrain.telemetry.store.reader import Frame, RecordedSegment
from clustertrain.telemetry.store.writer import GpuFacts

FIELDS = list(dict.fromkeys(f.name for f in (*fields.GPU, *fields.HOST, *fields.RANK)))
STDOUT = "-"
_CELLS = 8_000_000  # values read at a time: 64 MB
_ROWS = 200_000  # rows written at a time (a row group in Parquet): 80 MB

_CATEGORY = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        ("time_s", pa.float64()),  # UTC epoch s
        ("attempt", pa.int32()),
        ("node", _CATEGORY),
        ("device", _CATEGORY),  # gpu0, host, rank5
        ("uuid", _CATEGORY),  # of the GPU, or of the rank's GPU
        ("rank", pa.int32()),  # the rank, or the GPU's first rank
        *((name, _CATEGORY if name == "phase" else pa.float64()) for name in FIELDS),
    ]
)


class AttemptSegment(NamedTuple):
    """A segment and its attempt."""

    attempt: int
    segment: RecordedSegment


class RowFilter(NamedTuple):
    """Selection of the rows to export."""

    gpu_filter: Callable[[str, GpuFacts], bool] | None = None
    """``gpu_filter(node, facts)`` selects GPUs and their ranks; hosts are then left out."""
    since: float | None = None  # UTC epoch s, inclusive
    until: float | None = None  # UTC epoch s, exclusive


ALL_ROWS = RowFilter()


class TableExportResult(NamedTuple):
    """Result of an export."""

    rows: int
    errors: list[str]  # parts that could not be read, with the reason


ProgressCallback = Callable[[int, int], object]  # bytes read, bytes in total


def write_csv(
    segments: Sequence[AttemptSegment],
    path: str | Path,
    row_filter: RowFilter = ALL_ROWS,
    progress: ProgressCallback | None = None,
) -> TableExportResult:
    """Write the samples as CSV with empty cells for missing values.

    Args:
        path: output file; ``-`` is standard output, whose reader may exit before the end.

    Raises:
        ConfigError: ``path`` cannot be written, or is not a regular file.
    """
    from pyarrow import csv

    with _open_output(path) as f, csv.CSVWriter(f, SCHEMA) as writer:
        return _write(segments, row_filter, writer, progress)
    return TableExportResult(0, [])  # the reader exited early


def write_parquet(
    segments: Sequence[AttemptSegment],
    path: str | Path,
    row_filter: RowFilter = ALL_ROWS,
    progress: ProgressCallback | None = None,
) -> TableExportResult:
    """Write the samples as Parquet with null for missing values.

    Raises:
        ConfigError: ``path`` cannot be written, or is not a regular file.
        UsageError: ``path`` is ``-``.
    """
    from pyarrow import parquet

    if str(path) == STDOUT:
        raise UsageError("--parquet -: cannot write Parquet to standard output", fix="give a file name, or use --csv -")
    with _open_output(path) as f, parquet.ParquetWriter(f, SCHEMA, compression="zstd") as writer:
        return _write(segments, row_filter, writer, progress)


@contextlib.contextmanager
def _open_output(path: str | Path) -> Iterator[IO[bytes]]:
    if str(path) == STDOUT:
        with _ignore_broken_pipe():
            stdout = unwrap_stream(sys.stdout).buffer  # text in the table is already escaped
            yield stdout
            stdout.flush()
        return
    out = Path(path)
    if out.exists() and not out.is_file():
        raise ConfigError(f"{out} is not a regular file and would be replaced", fix="give the name of a file")
    try:
        # Permissions follow the umask, as with any program.
        with fsio.atomic_write(out, mode=0o666, durable=False) as f:
            yield f
    except OSError as e:
        raise ConfigError(
            f"{out} cannot be written: {e.strerror or e}", fix="give a path in a writable folder with enough disk space"
        ) from e


@contextlib.contextmanager
def _ignore_broken_pipe() -> Iterator[None]:
    """Suppress the error of a closed pipe, as in ``clustertrain telemetry RUN --csv - | head``."""
    try:
        yield
    except BrokenPipeError:
        # Python flushes standard output again at exit.
        with Path(os.devnull).open("wb") as devnull:
            os.dup2(devnull.fileno(), sys.stdout.fileno())


def _write(
    segments: Sequence[AttemptSegment], row_filter: RowFilter, writer: Any, progress: ProgressCallback | None
) -> TableExportResult:
    exports = [_SegmentExport(segment, row_filter) for segment in segments]
    total_bytes, done_bytes, rows = sum(s.size_bytes for s in exports), 0, 0
    for export in exports:
        for low, high in export.windows():
            for batch in export.batches(low, high):
                writer.write_batch(batch)
                rows += batch.num_rows
            done_bytes += export.estimate_bytes(low, high)
            if progress is not None:
                progress(min(done_bytes, total_bytes), total_bytes)
    return TableExportResult(rows, [export.read_error for export in exports if export.read_error is not None])


class _Device(NamedTuple):
    name: str
    uuid: str | None
    rank: int | None


class _SegmentExport:
    """Export of one segment within the selected time."""

    def __init__(self, source: AttemptSegment, row_filter: RowFilter) -> None:
        self.source = source
        header, newest = source.segment.header, _reopen(source.segment).newest_t
        self._devices = _list_devices(source, row_filter)
        names = {d.name for d in self._devices}
        self._columns = {
            pace: [
                c
                for c in header.columns(pace)
                if fields.split_column(c)[0] in names and fields.find_field(c) is not None
            ]
            for pace in (FAST, SLOW)
        }
        self.read_error = source.segment.read_error
        self.begin = self.end = 0.0
        if newest is not None and self._devices:
            self.begin = header.t if row_filter.since is None else max(header.t, row_filter.since)
            exclusive_end = newest + header.interval_s  # so that the newest sample is included
            self.end = max(
                self.begin, exclusive_end if row_filter.until is None else min(exclusive_end, row_filter.until)
            )

    @cached_property
    def _bytes_per_s(self) -> float:
        header = self.source.segment.header
        fast, slow = (len(self._columns[pace]) for pace in (FAST, SLOW))
        return 8.0 * max(1.0, fast / header.interval_s + slow / header.slow_s)

    @property
    def size_bytes(self) -> int:
        return self.estimate_bytes(self.begin, self.end)

    def estimate_bytes(self, low: float, high: float) -> int:
        return int((high - low) * self._bytes_per_s) if high > low else 0

    def windows(self) -> Iterator[tuple[float, float]]:
        """Yield windows of time whose samples fit into memory."""
        if self.end <= self.begin:
            return
        count = max(1, -(-self.size_bytes // (8 * _CELLS)))
        edges = np.linspace(self.begin, self.end, count + 1).tolist()
        yield from itertools.pairwise(edges)

    def batches(self, low: float, high: float) -> Iterator[pa.RecordBatch]:
        """Yield the rows with ``low <= t < high``."""
        segment = _reopen(self.source.segment)
        frames = [segment.samples(pace, columns, low, high) for pace, columns in self._columns.items()]
        self.read_error = self.read_error or segment.read_error
        times = np.union1d(frames[0].t, frames[1].t)
        batch_rows = max(1, _ROWS // len(self._devices))
        for first in range(0, len(times), batch_rows):
            yield self._build_batch(times[first : first + batch_rows], frames)

    def _build_batch(self, times: npt.NDArray[np.float64], frames: list[Frame]) -> pa.RecordBatch:
        """Build the rows of these times, one for each device read at that time."""
        frame_rows = [_select_rows(frame, times) for frame in frames]
        present = np.zeros((len(times), len(self._devices)), dtype=bool)
        for positions, values, _ in frame_rows:
            for j, device in enumerate(self._devices):
                if any(fields.split_column(c)[0] == device.name for c in values):
                    present[positions, j] = True
        device_index = np.broadcast_to(np.arange(len(self._devices), dtype=np.int32), present.shape)[present]
        columns: list[pa.Array] = [
            pa.array(np.broadcast_to(times[:, None], present.shape)[present]),
            pa.array(np.full(len(device_index), self.source.attempt, dtype=np.int32)),
            _dictionary_array(np.zeros(len(device_index), dtype=np.int32), [self.source.segment.header.node]),
            _dictionary_array(device_index, [d.name for d in self._devices]),
            _dictionary_array(device_index, [d.uuid for d in self._devices]),
            pa.array([d.rank for d in self._devices], pa.int32()).take(pa.array(device_index)),
        ]
        for name in FIELDS:
            columns.append(_field_array(name, self._field_table(name, frame_rows, present.shape), present))
        return pa.record_batch(columns, schema=SCHEMA)

    def _field_table(
        self, name: str, frame_rows: list[_FrameRows], shape: tuple[int, int]
    ) -> npt.NDArray[np.float64] | None:
        """Return the field's values [times, devices]; None if the segment lacks the field."""
        table = None
        for positions, values, rows in frame_rows:
            for j, device in enumerate(self._devices):
                column = values.get(fields.column_name(device.name, name))
                if column is not None:
                    table = np.full(shape, np.nan) if table is None else table
                    table[positions, j] = column[rows]
        return table


def _reopen(segment: RecordedSegment) -> RecordedSegment:
    """Return the segment without its cached files, which take 9 MB for each of up to a thousand segments."""
    return RecordedSegment(segment.folder, segment.header, segment.read_error)


class _FrameRows(NamedTuple):
    """Positions of the rows ``rows`` of a frame among a batch's times."""

    positions: npt.NDArray[np.intp]
    values: dict[str, npt.NDArray[np.float64]]
    rows: slice


def _select_rows(frame: Frame, times: npt.NDArray[np.float64]) -> _FrameRows:
    rows = slice(*np.searchsorted(frame.t, [times[0], np.nextafter(times[-1], np.inf)]).tolist())
    return _FrameRows(np.searchsorted(times, frame.t[rows]), frame.values, rows)


def _field_array(name: str, table: npt.NDArray[np.float64] | None, present: npt.NDArray[np.bool_]) -> pa.Array:
    arrow_type = SCHEMA.field(name).type
    if table is None:
        return pa.nulls(int(present.sum()), arrow_type)
    values = table[present]
    if name != "phase":
        return pa.array(values, from_pandas=True)  # NaN becomes null
    valid = (values >= 0) & (values < len(PHASES))
    codes = np.where(valid, values, 0).astype(np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=~valid), pa.array(PHASES))


def _dictionary_array(codes: npt.NDArray[np.int32], values: list[str] | list[str | None]) -> pa.Array:
    missing = np.array([w is None for w in values])
    dictionary = pa.array([printable(w or "") for w in values])
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=missing[codes]), dictionary)


def _list_devices(source: AttemptSegment, row_filter: RowFilter) -> list[_Device]:
    header = source.segment.header
    chosen = [
        (i, gpu)
        for i, gpu in enumerate(header.gpus)
        if row_filter.gpu_filter is None or row_filter.gpu_filter(header.node, gpu)
    ]
    uuid_by_rank = {rank: gpu.uuid for _, gpu in chosen for rank in gpu.ranks}
    devices = [_Device(f"gpu{i}", gpu.uuid, gpu.ranks[0] if gpu.ranks else None) for i, gpu in chosen]
    if row_filter.gpu_filter is None:
        devices.append(_Device("host", None, None))
    devices += [
        _Device(f"rank{r}", uuid_by_rank.get(r), r)
        for r in header.ranks
        if row_filter.gpu_filter is None or r in uuid_by_rank
    ]
    return devices
