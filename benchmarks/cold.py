"""Drop files from the page cache, as after a restart of the machine; determine their file system."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks.measure import CannotRun

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
_MAX_CACHED_SHARE = 0.01  # pages that move between the kernel's lists may stay
_ATTEMPTS = 20


def file_system(folder: Path) -> str:
    """Return the type of the file system of ``folder``."""
    mounted = [p for p in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(p.mountpoint)]
    return max(mounted, key=lambda p: len(p.mountpoint)).fstype if mounted else "unknown"


def make_cold(folder: Path) -> None:
    """Write out all files in ``folder`` and drop them from memory.

    Raises:
        CannotRun: a file stays in memory.
    """
    for path in (p for p in folder.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            _drop(fd, path)
        finally:
            os.close(fd)


def _drop(fd: int, path: Path) -> None:
    for _ in range(_ATTEMPTS):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        cached, pages = _count_cached_pages(fd)
        if cached <= max(1, _MAX_CACHED_SHARE * pages):
            return
        time.sleep(0.05)
    raise CannotRun(f"{path}: {cached} of {pages} pages stay in memory; choose a --folder on a disk")


def _count_cached_pages(fd: int) -> tuple[int, int]:
    """Return how many pages of a file are in memory, and how many it has."""
    size = os.fstat(fd).st_size
    if size == 0:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        failed = ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), flags)
        del view  # the map cannot be closed while the view exists
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return int((np.frombuffer(flags, dtype=np.uint8) & 1).sum()), pages
