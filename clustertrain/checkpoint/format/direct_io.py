"""File I/O that bypasses the page cache (``O_DIRECT``), without a copy in the kernel.

A checkpoint is large and rarely read soon. In the page cache it would displace the data set, and allocating the pages
takes longer than writing to the disk. On a file system without direct I/O, files are written and read normally.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Offsets, lengths and addresses must be multiples of this. Many disks need only 512.
ALIGN = 4096
_HUGE_PAGE_BYTES = 2 << 20
_UNSUPPORTED_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP)
_thread_local = threading.local()


class DirectWriter:
    """Writes a new file sequentially."""

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd = fd
        self._direct = direct
        self._offset = 0

    def write(self, data: memoryview) -> None:
        """Append ``data``. Its length must be a multiple of :data:`ALIGN`, except in the last call.

        Raises:
            OSError: the disk is full, …
        """
        aligned_len = len(data) - len(data) % ALIGN
        self._write_all(data[:aligned_len])
        if aligned_len < len(data):
            self._disable_direct()
            self._write_all(data[aligned_len:])

    def _write_all(self, data: memoryview) -> None:
        while data:
            try:
                written = os.pwrite(self._fd, data, self._offset)
            except OSError as e:
                if not self._direct or e.errno not in _UNSUPPORTED_ERRNOS:
                    raise
                self._disable_direct()
                continue
            self._offset += written
            data = data[written:]

    def _disable_direct(self) -> None:
        if self._direct:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False


@contextmanager
def open_for_write(path: Path) -> Iterator[DirectWriter]:
    """Create the file, which must not exist; it is durable after the block.

    Raises:
        OSError: the file system failed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        fd, direct = os.open(path, flags | os.O_DIRECT, 0o640), True
    except OSError as e:
        if e.errno not in _UNSUPPORTED_ERRNOS:
            raise
        path.unlink(missing_ok=True)  # some file systems create the file anyway
        fd, direct = os.open(path, flags, 0o640), False
    try:
        yield DirectWriter(fd, direct=direct)
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def open_for_read(path: Path) -> Iterator[int | None]:
    """Yield a file descriptor for :func:`read`, or None if the file system does not support direct I/O.

    Raises:
        OSError: the file does not exist, …
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as e:
        if e.errno not in _UNSUPPORTED_ERRNOS:
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def read(fd: int, offset: int, size: int) -> memoryview | None:
    """Return ``size`` bytes from ``offset`` on, fewer at the end of the file, or None if direct I/O fails there.

    The bytes are in a buffer of this thread, valid until its next call.

    Raises:
        OSError: the file system failed.
    """
    aligned_offset = offset - offset % ALIGN
    needed = offset - aligned_offset + size
    buffer = _thread_buffer(-(-needed // ALIGN) * ALIGN)
    filled = 0
    while filled < needed:
        try:
            nread = os.preadv(fd, [buffer[filled:]], aligned_offset + filled)
        except OSError as e:
            if e.errno not in _UNSUPPORTED_ERRNOS:
                raise
            return None
        filled += nread
        if aligned_offset + filled >= os.fstat(fd).st_size:
            break
        if nread == 0 or nread % ALIGN:  # a short read inside the file: the next offset would not be aligned
            return None
    return buffer[offset - aligned_offset : max(offset - aligned_offset, min(filled, needed))]


def _thread_buffer(size: int) -> memoryview:
    """Return this thread's aligned buffer, in huge pages if possible: fewer pages make a smaller disk request."""
    buffer: memoryview | None = getattr(_thread_local, "buffer", None)
    if buffer is None or len(buffer) < size:
        mapping = mmap.mmap(
            -1,
            -(-size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES + _HUGE_PAGE_BYTES,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping.madvise(mmap.MADV_DONTFORK)  # open(2): direct reads must not go into memory shared with a fork
        start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE_BYTES
        buffer = _thread_local.buffer = memoryview(mapping)[
            start : start + -(-size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        ]
    return buffer[:size]


def copy_bytes(target: memoryview, data: memoryview) -> None:
    """Copy ``data`` into ``target`` without holding the GIL. Both must be writable and have the same length."""
    if len(target) != len(data):
        raise ValueError(f"cannot copy {len(data)} bytes into {len(target)}")
    if data:
        ctypes.memmove(
            ctypes.byref(ctypes.c_char.from_buffer(target)), ctypes.byref(ctypes.c_char.from_buffer(data)), len(data)
        )
