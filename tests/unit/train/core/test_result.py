"""A full disk is the machine's trouble and not the script's, however the script meets it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from clustertrain.train.core.result import RankResult, classify_failure


def raised(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except Exception as e:
        return e
    raise AssertionError("nothing was raised")


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wrapped() -> None:
    try:
        full()
    except OSError as e:
        raise ValueError("the export failed") from e


def while_handled() -> None:
    try:
        full()
    except OSError:
        raise KeyError("cache")  # noqa: B904


def from_none() -> None:
    try:
        full()
    except OSError:
        raise ValueError("no") from None


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (wrapped, "environment"),
        (while_handled, "environment"),
        (from_none, "user_error"),
        (lambda: _raise(RuntimeError("write(): fd 3 failed with No space left on device")), "environment"),
        # As a DataLoader hands on what its worker met: the words are all that is left of it.
        (lambda: _raise(OSError("Caught OSError in DataLoader worker process 0.\n[Errno 122] Disk quota exceeded")),
         "environment"),
        (lambda: _raise(RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")), "storage"),
        (lambda: _raise(RuntimeError("shape mismatch")), "user_error"),
    ],
)  # fmt: skip
def test_full_disk_is_an_environment_failure(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], kind: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: _Roomy())
    assert classify_failure(raised(act)) == kind


class _Roomy:
    f_blocks = f_bavail = f_files = f_favail = 1 << 30
    f_frsize = 4096


def _raise(error: BaseException) -> None:
    raise error


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def by_path(folder: Path) -> None:
    torch.save(torch.zeros(1_000_000), folder / "model.pt")


def by_file(folder: Path) -> None:
    with (folder / "rows.bin").open("wb") as file:
        file.write(bytes(10_000_000))


def by_file_and_error_of_its_own(folder: Path) -> None:
    try:
        by_file(folder)
    except OSError as e:
        raise RuntimeError("saving failed") from e


@pytest.mark.parametrize("write", [by_path, by_file, by_file_and_error_of_its_own])
def test_failure_record_names_full_disk_and_fix(
    small_disk: Path, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    error = raised(lambda: write(small_disk))
    assert RankResult({"CLUSTERTRAIN_RANK_DIR": str(tmp_path), "RANK": "0"}).record_failure(error) == 78
    record = json.loads((tmp_path / "rank-0.json").read_text())
    assert record["kind"] == "environment"
    assert f"the disk of {small_disk}" in record["error"]["message"]
    assert "fix: make room there" in record["error"]["message"]
