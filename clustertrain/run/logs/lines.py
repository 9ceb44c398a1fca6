"""Lines at any place of a log, read without the rest of the file: a log of 1 GB costs as much as one of 1 MB."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

from clustertrain import reading

BLOCK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 16  # a longer line is split
MAX_WINDOW_BYTES = 1 << 20


class LogLine(NamedTuple):
    """One line, without its end."""

    offset: int
    """Of its first byte in the file."""
    text: str
    """What a terminal shows last if a progress bar wrote over the line; bytes that are not UTF-8 as ``\\xff``."""


class LogWindow(NamedTuple):
    """Consecutive lines of a log."""

    lines: list[LogLine]
    """The last one may be unfinished; it is then at offset ``end``."""
    start: int
    """Offset of the first line."""
    end: int
    """Offset after the last complete line: where to read on."""
    size: int
    """Of the file, in bytes."""


def read_before(path: Path, end: int | None, count: int, max_bytes: int = MAX_WINDOW_BYTES) -> LogWindow:
    """Return the last ``count`` lines before offset ``end``, or of the file; fewer if they have over ``max_bytes``.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if it does not exist.
    """
    with reading.open_regular(path) as f:
        size = _find_size(f)
        stop = size if end is None else min(end, size)
        start, text = stop, b""
        # One more line end than lines: that of the line before the first one.
        while start > 0 and text.count(b"\n") <= count and len(text) < max_bytes:
            block = min(BLOCK_BYTES, start)
            start -= block
            f.seek(start)
            text = f.read(block) + text
    lines, rest_start = _split(text, start)
    if start > 0 and len(lines) > 1:
        lines = lines[1:]  # it begins before the first block
    lines = lines[max(0, len(lines) - count) :]
    return LogWindow(lines, lines[0].offset if lines else stop, rest_start if end is None else stop, size)


def read_after(path: Path, start: int, max_bytes: int = MAX_WINDOW_BYTES) -> LogWindow:
    """Return the lines from offset ``start``, of at most ``max_bytes``.

    A file that is shorter than ``start`` was replaced, and is read from its beginning.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if it does not exist.
    """
    with reading.open_regular(path) as f:
        size = _find_size(f)
        start = start if start <= size else 0
        f.seek(start)
        text = f.read(max_bytes)
    lines, rest_start = _split(text, start)
    return LogWindow(lines, start, rest_start, size)


def split_at(line: bytes, offset: int) -> list[LogLine]:
    """Return a line, without its end, in pieces of at most :data:`MAX_LINE_BYTES`."""
    pieces = range(0, max(len(line), 1), MAX_LINE_BYTES)
    return [LogLine(offset + i, _decode(line[i : i + MAX_LINE_BYTES])) for i in pieces]


def _split(text: bytes, start: int) -> tuple[list[LogLine], int]:
    """Return the lines of ``text``, which begins at offset ``start``, and the offset of an unfinished last line."""
    lines: list[LogLine] = []
    *complete, rest = text.split(b"\n")
    for line in complete:
        lines += split_at(line, start)
        start += len(line) + 1
    if rest:
        lines += split_at(rest, start)
    # The pieces of an endless line are complete.
    return lines, start + len(rest) - len(rest) % MAX_LINE_BYTES


def _decode(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="backslashreplace")


def _find_size(f: BinaryIO) -> int:
    return f.seek(0, os.SEEK_END)
