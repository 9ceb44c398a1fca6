"""The door to files that somebody else wrote: runs, checkpoints, telemetry, profiles, tables.

Whoever can write a run's folder decides what lies in it. So nothing here waits (a FIFO), reads without an end (a
device, a file that grows) or takes more memory than the limits below (a file of 50 GB, a bomb, deeply nested JSON).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from clustertrain import schema
from clustertrain.errors import ClusterTrainError

MIB = 1 << 20
MAX_DOCUMENT_BYTES = 32 * MIB  # JSON and TOML
MAX_LINE_BYTES = 4 * MIB  # of JSON; a longer one is skipped
MAX_LINES_BYTES = 256 * MIB  # of a longer file of lines only the end is read
MAX_DEPTH = 100  # levels of nested JSON

_FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_FIX = "put the file back from a copy, or remove it"
_CHUNK_BYTES = 1 << 16
_MAX_DIGITS = 18
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_GZIP_WBITS = 16 + zlib.MAX_WBITS

T = TypeVar("T")


def is_unsigned_int(text: str) -> bool:
    """Whether ``text`` is a number of ASCII digits that fits into 64 bits. `str.isdigit` is also true of "²", which
    int() refuses, and of more digits than int() takes."""
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


class UnusableFile(ClusterTrainError, OSError, ValueError):
    """A file that is not of a kind, size or content that can be read. Whoever goes on without a file that cannot be
    opened or parsed goes on without this one, too."""

    def __init__(self, path: Path, reason: str, *, fix: str = _FIX) -> None:
        ClusterTrainError.__init__(self, f"{path}: {reason}", fix=fix)
        self.filename = str(path)
        self.strerror = reason

    def __str__(self) -> str:
        return ClusterTrainError.__str__(self)


@contextlib.contextmanager
def open_regular(path: Path, *, allow_fifo: bool = False) -> Iterator[BinaryIO]:
    """A regular file, or a link to one, to read from. Never waits for one to be written, unless it may be
    ``allow_fifo``: a file that the user has named may be ``<(…)`` of their shell.

    Raises:
        OSError: it cannot be opened; FileNotFoundError where there is none.
        UnusableFile: it is something else.
    """
    try:
        _check_file_type(path, path.stat().st_mode, allow_fifo)  # a device is not even opened: that alone may act on it
        fd = os.open(path, os.O_RDONLY | (0 if allow_fifo else os.O_NONBLOCK) | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise UnusableFile(path, "is a link that points to itself") from e
        raise
    try:
        _check_file_type(path, os.fstat(fd).st_mode, allow_fifo)  # somebody may have changed it between the two calls
    except BaseException:
        os.close(fd)
        raise
    with os.fdopen(fd, "rb") as file:
        yield file


def _check_file_type(path: Path, mode: int, allow_fifo: bool) -> None:
    if not stat.S_ISREG(mode) and not (allow_fifo and stat.S_ISFIFO(mode)):
        raise UnusableFile(path, f"is {_FILE_TYPES.get(stat.S_IFMT(mode), 'something else')}, not a file")


def read_bytes(path: Path, limit: int = MAX_DOCUMENT_BYTES, *, allow_fifo: bool = False) -> bytes:
    """What is in ``path``; ``allow_fifo`` as in :func:`open_regular`.

    Raises:
        OSError: it cannot be read; FileNotFoundError where there is none.
        UnusableFile: it is no file, or has more than ``limit`` bytes.
    """
    with open_regular(path, allow_fifo=allow_fifo) as file:
        size = os.fstat(file.fileno()).st_size
        # What has no size (in /proc), or grows, ends at the limit as well.
        chunks, remaining = [], limit + 1 if size <= limit else 0
        while remaining and (chunk := file.read(min(remaining, size + _CHUNK_BYTES))):
            chunks.append(chunk)
            remaining -= len(chunk)
        if not remaining:
            raise UnusableFile(path, f"is longer than {limit / MIB:g} MiB")
        return b"".join(chunks)


def read_text(path: Path, limit: int = MAX_DOCUMENT_BYTES) -> str:
    """As :func:`read_bytes`. Raises UnusableFile also for what is not UTF-8."""
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as e:
        raise UnusableFile(path, "is not UTF-8") from e


def read_json(path: Path, limit: int = MAX_DOCUMENT_BYTES) -> Any:
    """As :func:`read_text`; None where the file is empty. Raises UnusableFile also for what is not JSON."""
    text = read_text(path, limit)
    if not text.strip():
        return None
    try:
        return parse_json(text)
    except ValueError as e:
        raise UnusableFile(path, f"is not JSON: {e}") from e


def read_struct(path: Path, target_type: type[T], limit: int = MAX_DOCUMENT_BYTES) -> T:
    """As :func:`read_bytes`, as a ``target_type``. Raises UnusableFile also where it is not one."""
    try:
        return schema.decode(read_bytes(path, limit), target_type)
    except msgspec.MsgspecError as e:
        raise UnusableFile(path, f"does not have the expected content: {e}") from e


def parse_json(text: str | bytes) -> Any:
    """JSON of at most :data:`MAX_DEPTH` levels. Raises ValueError in words for anything else."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    except ValueError:
        raise ValueError("a number has more than 4,300 digits") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and is_too_deep(value):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return _replace_lone_surrogates(value) if "\\ud" in text or "\\uD" in text else value


def _replace_lone_surrogates(value: Any) -> Any:
    """With U+FFFD in the place of half a surrogate pair, which JSON can escape and no file name or terminal takes."""
    if isinstance(value, dict):
        return {_replace_lone_surrogates(key): _replace_lone_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace_lone_surrogates(inner) for inner in value]
    return _LONE_SURROGATE.sub("\ufffd", value) if isinstance(value, str) else value


def is_too_deep(value: Any) -> bool:
    """Whether lists and dicts are nested more than :data:`MAX_DEPTH` levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list)))
        level = [v for children in containers for v in children if isinstance(v, (dict, list))]
        if not level:
            return False
    return True


def iter_lines(path: Path, limit: int = MAX_LINES_BYTES) -> Iterator[bytes]:
    """The lines of a file, without those of more than :data:`MAX_LINE_BYTES`; of one with more than ``limit`` bytes
    those in its last ones. Raises as :func:`open_regular`."""
    with open_regular(path) as file:
        # With the byte before: what follows a line's end is whole.
        start = max(0, os.fstat(file.fileno()).st_size - limit - 1)
        file.seek(start)
        # A first line that is cut is left out, as is what is left of one that is too long.
        is_partial, remaining = start > 0, limit + 1
        while remaining > 0 and (line := file.readline(min(remaining, MAX_LINE_BYTES + 1))):
            remaining -= len(line)
            is_complete = line.endswith(b"\n")
            is_too_long = len(line) > MAX_LINE_BYTES and not is_complete
            if not is_partial and not is_too_long:
                yield line
            is_partial = (is_partial or is_too_long) and not is_complete


def decompress(data: bytes | memoryview, limit: int, wbits: int = _GZIP_WBITS) -> bytes:
    """One member of gzip, or what ``wbits`` says. Raises ValueError where it is damaged, or has more than ``limit``
    bytes unpacked."""
    decompressor = zlib.decompressobj(wbits)
    try:
        output = decompressor.decompress(data, limit + 1)
    except zlib.error as e:
        raise ValueError(str(e)) from e
    if len(output) > limit:
        raise ValueError(f"has more than {limit / MIB:g} MiB unpacked")
    if not decompressor.eof:
        raise ValueError("is cut short")
    return output
