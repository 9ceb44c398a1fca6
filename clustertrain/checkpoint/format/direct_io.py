"""Files past the page cache (``O_DIRECT``): the disk takes its bytes from where they are, and brings them to where they
are hashed.

A checkpoint is read by nobody soon, and is large: the pages that it would be copied into push the data set's out, and
finding them takes the processor longer than the disk needs. What a file system does not do is done the ordinary way.
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

# Offsets, lengths and addresses are multiples of it. Many disks would do with 512.
ALIGN = 4096
_HUGE = 2 << 20
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_own = threading.local()


class Writing:
    """A new file, written from its beginning to its end."""

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd = fd
        self._direct = direct
        self._at = 0

    def write(self, data: memoryview) -> None:
        """Append ``data``, of a multiple of :data:`ALIGN` bytes but for the last time.

        Raises:
            OSError: the disk is full, …
        """
        even = len(data) - len(data) % ALIGN
        self._write(data[:even])
        if even < len(data):
            self._ordinary()
            self._write(data[even:])

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                done = os.pwrite(self._fd, data, self._at)
            except OSError as e:
                if not self._direct or e.errno not in _REFUSED:
                    raise
                self._ordinary()
                continue
            self._at += done
            data = data[done:]

    def _ordinary(self) -> None:
        if self._direct:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False


@contextmanager
def writing(path: Path) -> Iterator[Writing]:
    """Make the file, which is not there yet; it is durable afterwards.

    Raises:
        OSError: as the file system says.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        fd, direct = os.open(path, flags | os.O_DIRECT, 0o640), True
    except OSError as e:
        if e.errno not in _REFUSED:
            raise
        path.unlink(missing_ok=True)  # some make the file all the same
        fd, direct = os.open(path, flags, 0o640), False
    try:
        yield Writing(fd, direct=direct)
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def reading(path: Path) -> Iterator[int | None]:
    """A file descriptor for :func:`read`; None where the file system does not do it.

    Raises:
        OSError: the file is not there, …
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as e:
        if e.errno not in _REFUSED:
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def read(fd: int, offset: int, size: int) -> memoryview | None:
    """``size`` bytes from ``offset`` on, fewer at the end of the file. They lie in memory of this thread's and are gone
    with its next call. None: the file system does not do it, or not here.

    Raises:
        OSError: as the file system says.
    """
    first = offset - offset % ALIGN
    wanted = offset - first + size
    room = _room(-(-wanted // ALIGN) * ALIGN)
    done = 0
    while done < wanted:
        try:
            got = os.preadv(fd, [room[done:]], first + done)
        except OSError as e:
            if e.errno not in _REFUSED:
                raise
            return None
        done += got
        if first + done >= os.fstat(fd).st_size:
            break
        if got == 0 or got % ALIGN:  # cut short where the file goes on: what follows is no place to begin again
            return None
    return room[offset - first : max(offset - first, min(done, wanted))]


def _room(size: int) -> memoryview:
    """Memory of this thread's, at such an address, in pages as large as there are: the fewer they are, the less there
    is to tell the disk."""
    kept: memoryview | None = getattr(_own, "room", None)
    if kept is None or len(kept) < size:
        made = mmap.mmap(-1, -(-size // _HUGE) * _HUGE + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a kernel without them
            made.madvise(mmap.MADV_HUGEPAGE)
        made.madvise(mmap.MADV_DONTFORK)  # open(2): not into memory that a fork shares meanwhile
        start = -ctypes.addressof(ctypes.c_char.from_buffer(made)) % _HUGE
        kept = _own.room = memoryview(made)[start : start + -(-size // _HUGE) * _HUGE]
    return kept[:size]


def copy(into: memoryview, data: memoryview) -> None:
    """As ``into[:] = data``, but other threads go on meanwhile. Both can be written to."""
    if len(into) != len(data):
        raise ValueError(f"{len(data)} bytes do not fit {len(into)}")
    if data:
        ctypes.memmove(
            ctypes.byref(ctypes.c_char.from_buffer(into)), ctypes.byref(ctypes.c_char.from_buffer(data)), len(data)
        )
