"""Direct I/O writes and reads the same bytes as ordinary files, and falls back to them."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain.checkpoint.format import direct_io

SIZE = 3 * direct_io.ALIGN + 123
CONTENT = random.Random(7).randbytes(SIZE)


def memory(at: int) -> memoryview:
    """Return ``CONTENT`` at offset ``at`` from the start of a page."""
    pages = mmap.mmap(-1, SIZE + direct_io.ALIGN)
    pages[at : at + SIZE] = CONTENT
    return memoryview(pages)[at : at + SIZE]


def without_direct_io(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``os.open`` as it behaves on a file system without O_DIRECT."""

    def open_(path: Path, flags: int, *args: Any) -> Any:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(path, flags, *args)

    return open_


@pytest.mark.parametrize("at", [0, 512, 1])
@pytest.mark.parametrize(
    "pieces",
    [[SIZE], [direct_io.ALIGN, SIZE - direct_io.ALIGN], [2 * direct_io.ALIGN, direct_io.ALIGN, 123], [0]],
    ids=["one write", "aligned and rest", "aligned pieces", "empty"],
)
def test_write_from_any_memory_offset(tmp_path: Path, at: int, pieces: list[int]) -> None:
    data, written = memory(at), 0
    with direct_io.open_for_write(tmp_path / "f") as file:
        for size in pieces:
            file.write(data[written : written + size])
            written += size
    assert (tmp_path / "f").read_bytes() == CONTENT[:written]


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(FileExistsError), direct_io.open_for_write(tmp_path / "f"):
        pass
    assert (tmp_path / "f").read_text() == "old"


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (1, 10), (511, 2), (direct_io.ALIGN - 1, 2), (SIZE - 1, 1)])
def test_read_of_any_range(tmp_path: Path, offset: int, size: int) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    with direct_io.open_for_read(tmp_path / "f") as fd:
        if fd is None:
            pytest.skip(f"{tmp_path}: the file system does not support O_DIRECT")
        data = direct_io.read(fd, offset, size)
        assert data is not None and bytes(data) == CONTENT[offset : offset + size]
        rest = direct_io.read(fd, offset, SIZE)
        assert rest is not None and bytes(rest) == CONTENT[offset:]
        past_end = direct_io.read(fd, SIZE + 5, 10)
        assert past_end is not None and len(past_end) == 0


def test_file_system_without_direct_io_gets_ordinary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", without_direct_io(os.open))
    with direct_io.open_for_write(tmp_path / "f") as file:
        file.write(memory(0))
    assert (tmp_path / "f").read_bytes() == CONTENT
    with direct_io.open_for_read(tmp_path / "f") as fd:
        assert fd is None


def test_read_returns_none_if_direct_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(fd: int, into: list[memoryview], offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    (tmp_path / "f").write_bytes(CONTENT)
    monkeypatch.setattr(os, "preadv", preadv)
    with (tmp_path / "f").open("rb") as file:
        assert direct_io.read(file.fileno(), 0, 10) is None


def test_full_disk_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"), direct_io.open_for_write(tmp_path / "f") as file:
        file.write(memory(0))
