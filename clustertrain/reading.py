"""Reading of files that another user may have written: runs, checkpoints, telemetry, profiles, tables.

A run folder may contain anything that its owner put there. So these functions never block (on a FIFO), never read
without end (from a device or a growing file) and never use more memory than the limits below allow (for a file of
50 GB, a decompression bomb or deeply nested JSON).
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
MAX_LINE_BYTES = 4 * MIB  # longer lines of JSON are skipped
MAX_LINES_BYTES = 256 * MIB  # of a longer file of lines, only the end is read
MAX_DEPTH = 100  # levels of nested JSON

_FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_FIX = "restore the file from a copy, or remove it"
_CHUNK_BYTES = 1 << 16
_MAX_DIGITS = 18
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_GZIP_WBITS = 16 + zlib.MAX_WBITS

T = TypeVar("T")


def is_unsigned_int(text: str) -> bool:
    """Return whether ``text`` consists of at most 18 ASCII digits, so that it fits into 64 bits.

    ``str.isdigit`` is also true for "²", which int() refuses, and for more digits than int() accepts.
    """
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


class UnusableFile(ClusterTrainError, OSError, ValueError):
    """A file whose type, size or content makes it unusable.

    It is both an OSError and a ValueError, so that code that tolerates files it cannot open or parse tolerates it too.
    """

    def __init__(self, path: Path, reason: str, *, fix: str = _FIX) -> None:
        ClusterTrainError.__init__(self, f"{path}: {reason}", fix=fix)
        self.filename = str(path)
        self.strerror = reason

    def __str__(self) -> str:
        return ClusterTrainError.__str__(self)


@contextlib.contextmanager
def open_regular(path: Path, *, allow_fifo: bool = False) -> Iterator[BinaryIO]:
    """Open a regular file, or a link to one, for reading.

    With ``allow_fifo``, also open a FIFO and wait for its writer: a path that the user types may be the shell's
    ``<(…)``.

    Raises:
        OSError: ``path`` cannot be opened; FileNotFoundError if it does not exist.
        UnusableFile: ``path`` is another type of file.
    """
    try:
        _check_file_type(path, path.stat().st_mode, allow_fifo)  # before opening, which may already act on a device
        fd = os.open(path, os.O_RDONLY | (0 if allow_fifo else os.O_NONBLOCK) | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise UnusableFile(path, "is a link that points to itself") from e
        raise
    try:
        _check_file_type(path, os.fstat(fd).st_mode, allow_fifo)  # it may have changed since the stat
    except BaseException:
        os.close(fd)
        raise
    with os.fdopen(fd, "rb") as file:
        yield file


def _check_file_type(path: Path, mode: int, allow_fifo: bool) -> None:
    if not stat.S_ISREG(mode) and not (allow_fifo and stat.S_ISFIFO(mode)):
        raise UnusableFile(path, f"is {_FILE_TYPES.get(stat.S_IFMT(mode), 'a special file')}, not a regular file")


def read_bytes(path: Path, limit: int = MAX_DOCUMENT_BYTES, *, allow_fifo: bool = False) -> bytes:
    """Read ``path``; ``allow_fifo`` is that of :func:`open_regular`.

    Raises:
        OSError: ``path`` cannot be read; FileNotFoundError if it does not exist.
        UnusableFile: ``path`` is not a file, or has more than ``limit`` bytes.
    """
    with open_regular(path, allow_fifo=allow_fifo) as file:
        size = os.fstat(file.fileno()).st_size
        # The limit also holds for files that report no size (in /proc) or that grow.
        chunks, remaining = [], limit + 1 if size <= limit else 0
        while remaining and (chunk := file.read(min(remaining, size + _CHUNK_BYTES))):
            chunks.append(chunk)
            remaining -= len(chunk)
        if not remaining:
            raise UnusableFile(path, f"is larger than {limit / MIB:g} MiB")
        return b"".join(chunks)


def read_text(path: Path, limit: int = MAX_DOCUMENT_BYTES) -> str:
    """Read ``path`` as UTF-8.

    Raises:
        OSError: as :func:`read_bytes`.
        UnusableFile: as :func:`read_bytes`, or the content is not UTF-8.
    """
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as e:
        raise UnusableFile(path, "is not UTF-8") from e


def read_json(path: Path, limit: int = MAX_DOCUMENT_BYTES) -> Any:
    """Read ``path`` as JSON; return None if it is empty.

    Raises:
        OSError: as :func:`read_bytes`.
        UnusableFile: as :func:`read_bytes`, or the content is not JSON.
    """
    text = read_text(path, limit)
    if not text.strip():
        return None
    try:
        return parse_json(text)
    except ValueError as e:
        raise UnusableFile(path, f"is not JSON: {e}") from e


def read_struct(path: Path, target_type: type[T], limit: int = MAX_DOCUMENT_BYTES) -> T:
    """Read ``path`` and decode its JSON as ``target_type``.

    Raises:
        OSError: as :func:`read_bytes`.
        UnusableFile: as :func:`read_bytes`, or the content is not a ``target_type``.
    """
    try:
        return schema.decode(read_bytes(path, limit), target_type)
    except msgspec.MsgspecError as e:
        raise UnusableFile(path, f"does not have the expected content: {e}") from e


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of at most :data:`MAX_DEPTH` levels.

    Raises:
        ValueError: ``text`` is not JSON, or exceeds a limit; the message says which.
    """
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
    """Return ``value`` with lone surrogates replaced by U+FFFD: JSON can contain them, file names and output cannot."""
    if isinstance(value, dict):
        return {_replace_lone_surrogates(key): _replace_lone_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace_lone_surrogates(inner) for inner in value]
    return _LONE_SURROGATE.sub("\ufffd", value) if isinstance(value, str) else value


def is_too_deep(value: Any) -> bool:
    """Return whether lists and dicts are nested more than :data:`MAX_DEPTH` levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list)))
        level = [v for children in containers for v in children if isinstance(v, (dict, list))]
        if not level:
            return False
    return True


def iter_lines(path: Path, limit: int = MAX_LINES_BYTES) -> Iterator[bytes]:
    """Yield the complete lines in the last ``limit`` bytes of a file, without those over :data:`MAX_LINE_BYTES`.

    Raises:
        OSError, UnusableFile: as :func:`open_regular`.
    """
    with open_regular(path) as file:
        # Start one byte earlier: if that byte is a line break, the first line is complete.
        start = max(0, os.fstat(file.fileno()).st_size - limit - 1)
        file.seek(start)
        # An incomplete first line is skipped, and so is the rest of a line that is too long.
        is_partial, remaining = start > 0, limit + 1
        while remaining > 0 and (line := file.readline(min(remaining, MAX_LINE_BYTES + 1))):
            remaining -= len(line)
            is_complete = line.endswith(b"\n")
            is_too_long = len(line) > MAX_LINE_BYTES and not is_complete
            if not is_partial and not is_too_long:
                yield line
            is_partial = (is_partial or is_too_long) and not is_complete


def decompress(data: bytes | memoryview, limit: int, wbits: int = _GZIP_WBITS) -> bytes:
    """Decompress one gzip member, or the zlib format that ``wbits`` selects.

    Raises:
        ValueError: ``data`` is damaged, or larger than ``limit`` bytes when decompressed.
    """
    decompressor = zlib.decompressobj(wbits)
    try:
        output = decompressor.decompress(data, limit + 1)
    except zlib.error as e:
        raise ValueError(str(e)) from e
    if len(output) > limit:
        raise ValueError(f"is larger than {limit / MIB:g} MiB when decompressed")
    if not decompressor.eof:
        raise ValueError("is truncated")
    return output
