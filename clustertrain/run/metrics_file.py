"""Reading of rows (``run/metrics.py``) from files of a million lines, without reading all of them."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from clustertrain import reading
from clustertrain.run.json_files import is_number

Row = dict[str, Any]
T = TypeVar("T")

WINDOW_BYTES = 1 << 14  # holds many rows of the built-in trainer
MAX_WHOLE_BYTES = 1 << 22  # larger files are sampled
SAMPLE_WINDOWS = 128
CHUNK_BYTES = 1 << 20
MAX_SEARCH_BYTES = 1 << 26  # limit of a search for a row
MAX_COLUMN_BYTES = 1 << 32  # part of a file that is read as columns: about ten million rows

_ROWS: msgspec.json.Decoder[Row] = msgspec.json.Decoder(Row)
# Python writes NaN and Infinity, which are not JSON; msgspec rejects them.
_NON_FINITE = re.compile(rb"(?<=[:,\[])\s*-?(?:NaN|Infinity)(?=[,}\]])")


def read_first(path: Path, size: int = WINDOW_BYTES, *, min_rows: int = 1) -> list[Row]:
    """Return the rows in the first ``size`` bytes, or in more if they have fewer than ``min_rows``.

    As all functions here, it treats a missing file as empty.
    """
    with _open_or_empty(path) as f:
        return _read_forward(f, 0, size, lambda rows: len(rows) >= min_rows)


def read_last(path: Path, size: int = 4096, *, min_rows: int = 1) -> list[Row]:
    """Return the rows in the last ``size`` bytes, or in more if they have fewer than ``min_rows``."""
    with _open_or_empty(path) as f:
        end = _find_size(f)
        while True:
            rows = _read_range(f, max(0, end - size), size)
            if len(rows) >= min_rows or size >= min(end, MAX_SEARCH_BYTES):
                return rows
            size *= 2


def find_row_at(path: Path, step: int) -> Row | None:
    """Return the last row whose step is at most ``step``, by bisection: steps rise within a file."""
    with _open_or_empty(path) as f:
        low, high = 0, _find_size(f)
        while high - low > WINDOW_BYTES:
            middle = (low + high) // 2
            window_rows = _read_forward(f, middle, WINDOW_BYTES, bool)
            if window_rows and window_rows[0]["step"] <= step:
                low = middle
            else:
                high = middle
        # The row may begin before ``high`` and end far after it.
        window_rows = _read_forward(
            f, low, high - low + WINDOW_BYTES, lambda rows: bool(rows) and rows[-1]["step"] > step
        )
    rows = [row for row in window_rows if row["step"] <= step]
    return rows[-1] if rows else None


def sample_rows(path: Path, skip: int = 0) -> list[Row]:
    """Return all rows but the first ``skip``; from a long file, those in evenly spaced windows up to its end."""
    with _open_or_empty(path) as f:
        size = _find_size(f)
        if size <= MAX_WHOLE_BYTES:
            return _read_range(f, 0, size)[skip:]
        stride = (size - WINDOW_BYTES) / (SAMPLE_WINDOWS - 1)
        rows = _read_forward(f, 0, WINDOW_BYTES, lambda window_rows: len(window_rows) > skip)[skip:]
        for i in range(1, SAMPLE_WINDOWS):
            newest = rows[-1]["step"] if rows else -1  # a window that was extended may overlap the next one
            rows += [row for row in _read_forward(f, round(i * stride), WINDOW_BYTES, bool) if row["step"] > newest]
    return rows


def read_columns(path: Path, keys: Sequence[str]) -> dict[str, array[float]]:
    """Return all rows as one array of doubles per key, with NaN for missing values and other types."""
    # Scalars of slices and layers ("validation_accuracy/night", "grad_norm/layers.0") are not attribute names.
    fields = {f"field_{i}": key for i, key in enumerate(keys)}
    row_type = msgspec.defstruct("_Row", [(field, Any, None) for field in fields], rename=fields, gc=False)
    decoder = msgspec.json.Decoder(row_type)
    arrays = {key: array("d") for key in keys}
    with _open_or_empty(path) as f:
        for lines in _iter_line_blocks(f):
            rows = _decode_lines(decoder, lines)
            for field, key in fields.items():
                arrays[key].extend([_to_float(getattr(row, field)) for row in rows])
    return arrays


def read_after(path: Path, offset: int) -> tuple[list[Row], int]:
    """Return the rows from byte ``offset`` on, in at most :data:`CHUNK_BYTES`, and the offset to read on from.

    Unlike the rows of the other functions, these may lack a step. An unfinished last line is read next time.
    """
    with _open_or_empty(path) as f:
        f.seek(offset)
        block = f.read(CHUNK_BYTES)
        while block and b"\n" not in block and len(block) < reading.MAX_LINE_BYTES and (more := f.read(CHUNK_BYTES)):
            block += more
    lines, end, rest = block.rpartition(b"\n")
    if not end:  # a longer line is not a row
        return [], offset + (len(rest) if len(rest) >= reading.MAX_LINE_BYTES else 0)
    return _decode_lines(_ROWS, lines), offset + len(lines) + 1


def _decode_lines(decoder: msgspec.json.Decoder[T], lines: bytes) -> list[T]:
    try:
        return decoder.decode_lines(lines)
    except (ValueError, RecursionError):
        pass
    rows = []
    for line in _NON_FINITE.sub(b"null", lines).split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):  # torn, empty, or nested too deep
            rows.append(decoder.decode(line))
    return rows


def _to_float(value: object) -> float:
    return value if type(value) is float else float(value) if is_number(value) else math.nan


def _iter_line_blocks(f: BinaryIO) -> Iterator[bytes]:
    """Yield blocks of whole lines."""
    partial_line, remaining = b"", MAX_COLUMN_BYTES
    while remaining > 0 and (block := f.read(CHUNK_BYTES)):
        remaining -= len(block)
        lines, end, tail = (partial_line + block).rpartition(b"\n")
        if end:
            yield lines
        # A longer one is not a row, and its rest is not valid JSON either.
        partial_line = tail if len(tail) < reading.MAX_LINE_BYTES else b""
    if partial_line:
        yield partial_line


@contextlib.contextmanager
def _open_or_empty(path: Path) -> Iterator[BinaryIO]:
    with contextlib.ExitStack() as stack:
        file: BinaryIO = io.BytesIO()
        with contextlib.suppress(FileNotFoundError):
            file = stack.enter_context(reading.open_regular(path))
        yield file


def _find_size(f: BinaryIO) -> int:
    return f.seek(0, os.SEEK_END)


def _read_forward(f: BinaryIO, start: int, size: int, has_enough: Callable[[list[Row]], bool]) -> list[Row]:
    """Return the rows in ``size`` bytes from ``start``, or in more bytes until ``has_enough`` is true for them.

    A row with many scalars may be longer than a window.
    """
    end = _find_size(f)
    while True:
        rows = _read_range(f, start, size)
        if has_enough(rows) or start + size >= end or size >= MAX_SEARCH_BYTES:
            return rows
        size *= 2


def _read_range(f: BinaryIO, start: int, size: int) -> list[Row]:
    """Return the rows that lie completely within these bytes."""
    # With the byte before: after a line break, the first line is complete.
    f.seek(max(0, start - 1))
    lines = f.read(size + (start > 0)).split(b"\n")
    rows = []
    for line in lines[1 if start > 0 else 0 :]:
        with contextlib.suppress(ValueError):
            row = reading.parse_json(line)
            if isinstance(row, dict) and type(step := row.get("step")) is int and is_number(step):
                rows.append(row)
    return rows
