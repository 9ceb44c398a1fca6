"""Rows of training scalars (``run/metrics.py``) out of files of a million lines, without reading more than is asked."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from clustertrain import reading
from clustertrain.run.json_files import is_number

Row = dict[str, Any]

WINDOW = 1 << 14  # bytes, many rows of the trainer's own
WHOLE = 1 << 22  # files up to here are read whole where a sample would do
WINDOWS = 128  # that a longer one is sampled in
CHUNK = 1 << 20
MOST = 1 << 26  # bytes that are looked at for a row: what has none in them has none
COLUMNS_MOST = 1 << 32  # bytes of a file that become columns: some ten million rows

# Python writes what JSON does not know, and msgspec refuses it.
_NO_NUMBER = re.compile(rb"(?<=[:,\[])\s*-?(?:NaN|Infinity)(?=[,}\]])")


def first(path: Path, size: int = WINDOW, *, least: int = 1) -> list[Row]:
    """The rows in the first ``size`` bytes, or in as many more as ``least`` rows take; empty where there is no file, as
    below."""
    with _opened(path) as f:
        return _forward(f, 0, size, lambda found: len(found) >= least)


def last(path: Path, size: int = 4096, *, least: int = 1) -> list[Row]:
    """The rows in the last ``size`` bytes, or in as many more as ``least`` rows take."""
    with _opened(path) as f:
        end = _size(f)
        while True:
            found = _within(f, max(0, end - size), size)
            if len(found) >= least or size >= min(end, MOST):
                return found
            size *= 2


def at(path: Path, step: int) -> Row | None:
    """The last row whose step is at most ``step``, found by halving: steps rise within an attempt."""
    with _opened(path) as f:
        low, high = 0, _size(f)
        while high - low > WINDOW:
            middle = (low + high) // 2
            found = _forward(f, middle, WINDOW, bool)
            if found and found[0]["step"] <= step:
                low = middle
            else:
                high = middle
        # The row that is wanted may begin before the middle that was one too high, and end far behind it.
        found = _forward(f, low, high - low + WINDOW, lambda found: bool(found) and found[-1]["step"] > step)
    rows = [row for row in found if row["step"] <= step]
    return rows[-1] if rows else None


def sample(path: Path, skip: int = 0) -> list[Row]:
    """All rows but the first ``skip``; of a long file those in evenly spread windows, its end among them."""
    with _opened(path) as f:
        size = _size(f)
        if size <= WHOLE:
            return _within(f, 0, size)[skip:]
        stride = (size - WINDOW) / (WINDOWS - 1)
        rows = _forward(f, 0, WINDOW, lambda found: len(found) > skip)[skip:]
        for i in range(1, WINDOWS):
            newest = rows[-1]["step"] if rows else -1  # a window that grew may reach into the next one
            rows += [row for row in _forward(f, round(i * stride), WINDOW, bool) if row["step"] > newest]
    return rows


def columns(path: Path, keys: Sequence[str]) -> dict[str, array[float]]:
    """All rows as one array of doubles a key; nan where a row has none or it is no number."""
    # The names of slices and layers ("validation_accuracy/night", "grad_norm/layers.0") are no names of attributes.
    fields = {f"field_{i}": key for i, key in enumerate(keys)}
    shape = msgspec.defstruct("_Row", [(field, Any, None) for field in fields], rename=fields, gc=False)
    decoder = msgspec.json.Decoder(shape)
    found = {key: array("d") for key in keys}
    with _opened(path) as f:
        for lines in _chunks(f):
            rows = _decoded(decoder, lines)
            for field, key in fields.items():
                found[key].extend([_number(getattr(row, field)) for row in rows])
    return found


def _decoded(decoder: msgspec.json.Decoder[Any], lines: bytes) -> list[Any]:
    try:
        return decoder.decode_lines(lines)
    except (ValueError, RecursionError):
        pass
    rows = []
    for line in _NO_NUMBER.sub(b"null", lines).split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):  # torn, empty, or nested too deep
            rows.append(decoder.decode(line))
    return rows


def _number(value: Any) -> float:
    return value if type(value) is float else float(value) if is_number(value) else math.nan


def _chunks(f: BinaryIO) -> Iterator[bytes]:
    """Whole lines."""
    rest, left = b"", COLUMNS_MOST
    while left > 0 and (block := f.read(CHUNK)):
        left -= len(block)
        lines, end, tail = (rest + block).rpartition(b"\n")
        if end:
            yield lines
        rest = tail if len(tail) < reading.LINE_BYTES else b""  # no row: its end does not read either
    if rest:
        yield rest


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with contextlib.ExitStack() as stack:
        found: BinaryIO = io.BytesIO()
        with contextlib.suppress(FileNotFoundError):
            found = stack.enter_context(reading.opened(path))
        yield found


def _size(f: BinaryIO) -> int:
    return f.seek(0, os.SEEK_END)


def _forward(f: BinaryIO, start: int, size: int, enough: Callable[[list[Row]], bool]) -> list[Row]:
    """The rows in ``size`` bytes from ``start``, or in as many more as it takes to have ``enough``: a row of many
    scalars may be longer than any window."""
    end = _size(f)
    while True:
        found = _within(f, start, size)
        if enough(found) or start + size >= end or size >= MOST:
            return found
        size *= 2


def _within(f: BinaryIO, start: int, size: int) -> list[Row]:
    """The rows that lie in these bytes whole."""
    # With the byte before: what follows a line's end is whole.
    f.seek(max(0, start - 1))
    lines = f.read(size + (start > 0)).split(b"\n")
    rows = []
    for line in lines[1 if start > 0 else 0 :]:
        with contextlib.suppress(ValueError):
            row = reading.parse(line)
            if isinstance(row, dict) and type(step := row.get("step")) is int and is_number(step):
                rows.append(row)
    return rows
