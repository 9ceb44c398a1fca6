"""Files past the page cache: the bytes are the same, also where the file system does not do it."""

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
    """The content, so many bytes from the beginning of a page."""
    made = mmap.mmap(-1, SIZE + direct_io.ALIGN)
    made[at : at + SIZE] = CONTENT
    return memoryview(made)[at : at + SIZE]


def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
    """What a file system does that knows nothing of it, when it is asked to open a file."""

    def open_(path: Path, flags: int, *args: Any) -> Any:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(path, flags, *args)

    return open_


@pytest.mark.parametrize("at", [0, 512, 1])
@pytest.mark.parametrize(
    "pieces", [[SIZE], [direct_io.ALIGN, SIZE - direct_io.ALIGN], [2 * direct_io.ALIGN, direct_io.ALIGN, 123], [0]]
)
def test_what_is_written_is_there_wherever_it_lay(tmp_path: Path, at: int, pieces: list[int]) -> None:
    data, done = memory(at), 0
    with direct_io.open_for_write(tmp_path / "f") as file:
        for size in pieces:
            file.write(data[done : done + size])
            done += size
    assert (tmp_path / "f").read_bytes() == CONTENT[:done]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(FileExistsError), direct_io.open_for_write(tmp_path / "f"):
        pass
    assert (tmp_path / "f").read_text() == "old"


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (1, 10), (511, 2), (direct_io.ALIGN - 1, 2), (SIZE - 1, 1)])
def test_any_part_can_be_read(tmp_path: Path, offset: int, size: int) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    with direct_io.open_for_read(tmp_path / "f") as fd:
        if fd is None:
            pytest.skip(f"{tmp_path}: no direct reading there")
        found = direct_io.read(fd, offset, size)
        assert found is not None and bytes(found) == CONTENT[offset : offset + size]
        beyond = direct_io.read(fd, offset, SIZE)
        assert beyond is not None and bytes(beyond) == CONTENT[offset:]
        nothing = direct_io.read(fd, SIZE + 5, 10)
        assert nothing is not None and len(nothing) == 0


def test_a_file_system_that_refuses_gets_ordinary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", refusing(os.open))
    with direct_io.open_for_write(tmp_path / "f") as file:
        file.write(memory(0))
    assert (tmp_path / "f").read_bytes() == CONTENT
    with direct_io.open_for_read(tmp_path / "f") as fd:
        assert fd is None


def test_one_that_refuses_when_it_is_read_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(fd: int, into: list[memoryview], offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    (tmp_path / "f").write_bytes(CONTENT)
    monkeypatch.setattr(os, "preadv", preadv)
    with (tmp_path / "f").open("rb") as file:
        assert direct_io.read(file.fileno(), 0, 10) is None


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"), direct_io.open_for_write(tmp_path / "f") as file:
        file.write(memory(0))
