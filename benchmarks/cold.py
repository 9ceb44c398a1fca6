"""Files as they are after a restart of the machine: not in its memory. And what kind of file system holds them."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks.measure import CannotRun

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_LEFT = 0.01  # of a file, that may stay: pages on their way between the kernel's lists
_TRIES = 20


def file_system(folder: Path) -> str:
    """Its type."""
    mounted = [p for p in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(p.mountpoint)]
    return max(mounted, key=lambda p: len(p.mountpoint)).fstype if mounted else "unknown"


def make_cold(folder: Path) -> None:
    """Write out all files in ``folder`` and drop them from memory.

    Raises:
        CannotRun: one is still there.
    """
    for path in (p for p in folder.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            _drop(fd, path)
        finally:
            os.close(fd)


def _drop(fd: int, path: Path) -> None:
    for _ in range(_TRIES):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        there, pages = _in_memory(fd)
        if there <= max(1, _LEFT * pages):
            return
        time.sleep(0.05)
    raise CannotRun(f"{path}: {there} of {pages} pages stay in memory; choose a --folder on a disk")


def _in_memory(fd: int) -> tuple[int, int]:
    """How many pages of a file are, and how many it has."""
    size = os.fstat(fd).st_size
    if size == 0:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        failed = ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), found)
        del view  # the map cannot be closed while it is there
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return int((np.frombuffer(found, dtype=np.uint8) & 1).sum()), pages
