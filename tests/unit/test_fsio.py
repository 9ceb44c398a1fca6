"""Writes that replace or create a file, and how they fail."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from clustertrain import fsio


def test_failed_write_names_its_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    fsio.write_bytes(path, b"old")
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"plot\.svg") as e:
            fsio.write_bytes(path, b"new" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert e.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_reader_may_rename_the_folder_as_soon_as_it_sees_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 publishes a checkpoint when it sees the last done-file, which its writer still has to make durable."""
    folder, replace = tmp_path / "staging", Path.replace
    folder.mkdir()

    def replace_and_rename_folder(path: Path, target: Path) -> None:
        replace(path, target)
        folder.rename(tmp_path / "final")

    monkeypatch.setattr(Path, "replace", replace_and_rename_folder)
    fsio.write_bytes(folder / "done", b"part")
    assert (tmp_path / "final" / "done").read_bytes() == b"part"


def test_file_that_cannot_be_created_is_named_by_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "no such folder" / "plot.svg"
    with pytest.raises(FileNotFoundError) as e:
        fsio.write_bytes(path, b"new")
    assert e.value.filename == str(path)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_only_one_writer_creates_a_file_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code), str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "1.json"
    assert fsio.create_json(path, {"by": "first"})
    assert not fsio.create_json(path, {"by": "second"})
    assert json.loads(path.read_text()) == {"by": "first"} and list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o007 == 0


def test_failed_creation_without_hard_links_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced_fds: list[int] = []
    real_fsync = os.fsync

    def fail_third_sync(fd: int) -> None:
        synced_fds.append(fd)
        if len(synced_fds) == 3:  # after those of the temporary file and its folder
            raise OSError(errno.ENOSPC, "no space")
        real_fsync(fd)

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", fail_third_sync)
    with pytest.raises(OSError, match="no space"):
        fsio.create_json(tmp_path / "1.json", {})
    assert list(tmp_path.iterdir()) == []
    assert fsio.create_json(tmp_path / "1.json", {})


def test_other_errors_of_a_hard_link_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        fsio.create_json(tmp_path / "1.json", {})
    assert list(tmp_path.iterdir()) == []
