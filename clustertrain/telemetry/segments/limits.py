"""The bounds of what a segment's files may say. They may be damaged, or of another hand: a reader takes nothing from
them that a sampler cannot have written."""

from __future__ import annotations

import os
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

MOST_S = 1e9  # seconds of one segment, 31 years
MOST_NUMBER = 1e25  # of a sum of all that was sampled
MOST_BYTES = 1 << 28  # that one piece is unpacked to
MOST_RANKS = 1 << 24

T = TypeVar("T")


def opened(path: Path) -> BinaryIO:
    """The file to read; OSError where it is something else: to open a pipe would wait for its writer."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    raise OSError(f"{path.name} is not a regular file")


def content(path: Path) -> bytes:
    """All of a file, OSError also where it is too large."""
    with opened(path) as f:
        if os.fstat(f.fileno()).st_size > MOST_BYTES:
            raise OSError(f"{path.name} has more than {MOST_BYTES >> 20} MiB")
        return f.read()


def decoded(data: bytes, kind: type[T]) -> T:
    """Raises ValueError where it is not that."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as e:
        raise ValueError("damaged: nested too deeply") from e


def unpacked(data: bytes | memoryview, most: int = MOST_BYTES, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Of zlib, or by ``wbits`` of another wrapping. Raises ValueError where it is damaged, or more than ``most``."""
    unpacker = zlib.decompressobj(wbits)
    try:
        text = unpacker.decompress(data, most + 1)
    except zlib.error as e:
        raise ValueError(f"damaged: {e}") from e
    if len(text) > most or not unpacker.eof:
        raise ValueError("damaged: cut short, or too long")
    return text


def within(value: Any, low: float, high: float) -> bool:
    """Of a number; no for NaN."""
    return bool(low <= value <= high)
