"""All samples of a run as one table, in CSV or Parquet: a row a moment and device, a column a field.

Written in pieces, so that a week of a thousand GPUs takes no more memory than an hour of eight.
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
from clustertrain.printable import printable, raw
from clustertrain.run.heartbeat import PHASES
from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW
from clustertrain.telemetry.store.reader import Frame, Segment
from clustertrain.telemetry.store.writer import GpuFacts

FIELDS = list(dict.fromkeys(f.name for f in (*fields.GPU, *fields.HOST, *fields.RANK)))
STDOUT = "-"
_CELLS = 8_000_000  # that are read at a time: 64 MB
_ROWS = 200_000  # of a piece that is written, in Parquet a row group: 80 MB

_WORD = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        ("time_s", pa.float64()),  # UTC epoch s
        ("attempt", pa.int32()),
        ("node", _WORD),
        ("device", _WORD),  # gpu0, host, rank5
        ("uuid", _WORD),  # of the GPU, or of the GPU of the rank
        ("rank", pa.int32()),  # of the rank, or the first of the GPU
        *((name, _WORD if name == "phase" else pa.float64()) for name in FIELDS),
    ]
)


class Part(NamedTuple):
    """A segment and the attempt that it is of."""

    attempt: int
    segment: Segment


class Choice(NamedTuple):
    """What of it is wanted. ``gpu(node, facts)``: these GPUs and their ranks alone, and no hosts. ``since``, ``until``:
    UTC epoch s, from the one until before the other."""

    gpu: Callable[[str, GpuFacts], bool] | None = None
    since: float | None = None
    until: float | None = None


ALL = Choice()


class Written(NamedTuple):
    """``trouble``: what could not be read, and why."""

    rows: int
    trouble: list[str]


Progress = Callable[[int, int], object]  # bytes that are read, and all there are


def write_csv(
    parts: Sequence[Part], path: str | Path, choice: Choice = ALL, progress: Progress | None = None
) -> Written:
    """``path`` ``-`` is standard output, whose reader may leave before the end. What is missing is an empty cell.

    Raises:
        ConfigError: ``path`` cannot be written, or is no regular file.
    """
    from pyarrow import csv

    with _target(path) as f, csv.CSVWriter(f, SCHEMA) as writer:
        return _write(parts, choice, writer, progress)
    return Written(0, [])  # the reader left


def write_parquet(
    parts: Sequence[Part], path: str | Path, choice: Choice = ALL, progress: Progress | None = None
) -> Written:
    """What is missing is null. Raises as :func:`write_csv`.

    Raises:
        UsageError: ``path`` is ``-``.
    """
    from pyarrow import parquet

    if str(path) == STDOUT:
        raise UsageError("--parquet -: a Parquet file cannot go to standard output", fix="name a file, or take --csv -")
    with _target(path) as f, parquet.ParquetWriter(f, SCHEMA, compression="zstd") as writer:
        return _write(parts, choice, writer, progress)


@contextlib.contextmanager
def _target(path: str | Path) -> Iterator[IO[bytes]]:
    if str(path) == STDOUT:
        with _until_the_reader_leaves():
            stdout = raw(sys.stdout).buffer  # the text in the table is escaped
            yield stdout
            stdout.flush()
        return
    out = Path(path)
    if out.exists() and not out.is_file():
        raise ConfigError(f"{out} is not a regular file, and would be replaced", fix="give the name of a file")
    try:
        # As any program of the user's would: as open to others as the umask says.
        with fsio.replacing(out, mode=0o666, durable=False) as f:
            yield f
    except OSError as e:
        raise ConfigError(
            f"{out} cannot be written: {e.strerror or e}", fix="give a path in a folder of yours, on a disk with room"
        ) from e


@contextlib.contextmanager
def _until_the_reader_leaves() -> Iterator[None]:
    """``clustertrain telemetry RUN --csv - | head`` is no error."""
    try:
        yield
    except BrokenPipeError:
        # Python flushes standard output once more when it ends.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _write(parts: Sequence[Part], choice: Choice, writer: Any, progress: Progress | None) -> Written:
    spans = [_Span(part, choice) for part in parts]
    total, done, rows = sum(s.size for s in spans), 0, 0
    for span in spans:
        for low, high in span.windows():
            for batch in span.batches(low, high):
                writer.write_batch(batch)
                rows += batch.num_rows
            done += span.size_of(low, high)
            if progress is not None:
                progress(min(done, total), total)
    return Written(rows, [span.trouble for span in spans if span.trouble is not None])


class _Device(NamedTuple):
    name: str
    uuid: str | None
    rank: int | None


class _Span:
    """One segment, in the part of the time that is wanted."""

    def __init__(self, part: Part, choice: Choice) -> None:
        self.part = part
        header, newest = part.segment.header, _unread(part.segment).newest_t
        self._devices = _devices(part, choice)
        names = {d.name for d in self._devices}
        self._columns = {
            pace: [c for c in header.columns(pace) if fields.split(c)[0] in names and fields.of(c) is not None]
            for pace in (FAST, SLOW)
        }
        self.trouble = part.segment.trouble
        self.begin = self.end = 0.0
        if newest is not None and self._devices:
            self.begin = header.t if choice.since is None else max(header.t, choice.since)
            past = newest + header.interval_s  # `until` is exclusive
            self.end = max(self.begin, past if choice.until is None else min(past, choice.until))

    @cached_property
    def _bytes_per_s(self) -> float:
        header = self.part.segment.header
        fast, slow = (len(self._columns[pace]) for pace in (FAST, SLOW))
        return 8.0 * max(1.0, fast / header.interval_s + slow / header.slow_s)

    @property
    def size(self) -> int:
        return self.size_of(self.begin, self.end)

    def size_of(self, low: float, high: float) -> int:
        return int((high - low) * self._bytes_per_s) if high > low else 0

    def windows(self) -> Iterator[tuple[float, float]]:
        """The time, cut so that what is read at once fits into memory."""
        if self.end <= self.begin:
            return
        count = max(1, -(-self.size // (8 * _CELLS)))
        edges = np.linspace(self.begin, self.end, count + 1).tolist()
        yield from itertools.pairwise(edges)

    def batches(self, low: float, high: float) -> Iterator[pa.RecordBatch]:
        segment = _unread(self.part.segment)
        frames = [segment.samples(pace, columns, low, high) for pace, columns in self._columns.items()]
        self.trouble = self.trouble or segment.trouble
        times = np.union1d(frames[0].t, frames[1].t)
        at_once = max(1, _ROWS // len(self._devices))
        for first in range(0, len(times), at_once):
            yield self._batch(times[first : first + at_once], frames)

    def _batch(self, times: npt.NDArray[np.float64], frames: list[Frame]) -> pa.RecordBatch:
        """The rows of these moments: of each the devices that were read then, in their order."""
        pieces = [_piece(frame, times) for frame in frames]
        there = np.zeros((len(times), len(self._devices)), dtype=bool)
        for at, values, _ in pieces:
            for j, device in enumerate(self._devices):
                if any(fields.split(c)[0] == device.name for c in values):
                    there[at, j] = True
        which = np.broadcast_to(np.arange(len(self._devices), dtype=np.int32), there.shape)[there]
        columns: list[pa.Array] = [
            pa.array(np.broadcast_to(times[:, None], there.shape)[there]),
            pa.array(np.full(len(which), self.part.attempt, dtype=np.int32)),
            _words(np.zeros(len(which), dtype=np.int32), [self.part.segment.header.node]),
            _words(which, [d.name for d in self._devices]),
            _words(which, [d.uuid for d in self._devices]),
            pa.array([d.rank for d in self._devices], pa.int32()).take(pa.array(which)),
        ]
        for name in FIELDS:
            columns.append(_cells(name, self._table(name, pieces, there.shape), there))
        return pa.record_batch(columns, schema=SCHEMA)

    def _table(self, name: str, pieces: list[_Piece], shape: tuple[int, int]) -> npt.NDArray[np.float64] | None:
        """Moments x devices; None where the segment has no such field."""
        found = None
        for at, values, rows in pieces:
            for j, device in enumerate(self._devices):
                column = values.get(fields.column(device.name, name))
                if column is not None:
                    found = np.full(shape, np.nan) if found is None else found
                    found[at, j] = column[rows]
        return found


def _unread(segment: Segment) -> Segment:
    """The same one, without what it keeps of its files once it was asked: 9 MB, for each of a thousand."""
    return Segment(segment.folder, segment.header, segment.trouble)


class _Piece(NamedTuple):
    """Where the rows ``rows`` of a frame stand among a batch's moments."""

    at: npt.NDArray[np.intp]
    values: dict[str, npt.NDArray[np.float64]]
    rows: slice


def _piece(frame: Frame, times: npt.NDArray[np.float64]) -> _Piece:
    rows = slice(*np.searchsorted(frame.t, [times[0], np.nextafter(times[-1], np.inf)]).tolist())
    return _Piece(np.searchsorted(times, frame.t[rows]), frame.values, rows)


def _cells(name: str, table: npt.NDArray[np.float64] | None, there: npt.NDArray[np.bool_]) -> pa.Array:
    kind = SCHEMA.field(name).type
    if table is None:
        return pa.nulls(int(there.sum()), kind)
    values = table[there]
    if name != "phase":
        return pa.array(values, from_pandas=True)  # NaN becomes null
    known = (values >= 0) & (values < len(PHASES))
    codes = np.where(known, values, 0).astype(np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=~known), pa.array(PHASES))


def _words(codes: npt.NDArray[np.int32], words: list[str] | list[str | None]) -> pa.Array:
    missing = np.array([w is None for w in words])
    shown = pa.array([printable(w or "") for w in words])
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=missing[codes]), shown)


def _devices(part: Part, choice: Choice) -> list[_Device]:
    header = part.segment.header
    chosen = [(i, gpu) for i, gpu in enumerate(header.gpus) if choice.gpu is None or choice.gpu(header.node, gpu)]
    uuid_of = {rank: gpu.uuid for _, gpu in chosen for rank in gpu.ranks}
    found = [_Device(f"gpu{i}", gpu.uuid, gpu.ranks[0] if gpu.ranks else None) for i, gpu in chosen]
    if choice.gpu is None:
        found.append(_Device("host", None, None))
    found += [_Device(f"rank{r}", uuid_of.get(r), r) for r in header.ranks if choice.gpu is None or r in uuid_of]
    return found
