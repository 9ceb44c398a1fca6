"""A full disk is an environment failure, however the script's error reports it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from clustertrain.train.core.result import RankResultWriter, classify_failure


def catch(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except Exception as e:
        return e
    raise AssertionError("nothing was raised")


def raise_disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raise_from_disk_full() -> None:
    try:
        raise_disk_full()
    except OSError as e:
        raise ValueError("the export failed") from e


def raise_while_handling() -> None:
    try:
        raise_disk_full()
    except OSError:
        raise KeyError("cache")  # noqa: B904


def raise_from_none() -> None:
    try:
        raise_disk_full()
    except OSError:
        raise ValueError("no") from None


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (raise_from_disk_full, "environment"),
        (raise_while_handling, "environment"),
        (raise_from_none, "error"),
        (lambda: _raise(RuntimeError("write(): fd 3 failed with No space left on device")), "environment"),
        # A DataLoader passes on a worker's error as text only.
        (lambda: _raise(OSError("Caught OSError in DataLoader worker process 0.\n[Errno 122] Disk quota exceeded")),
         "environment"),
        (lambda: _raise(RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")), "storage"),
        (lambda: _raise(RuntimeError("shape mismatch")), "error"),
    ],
    ids=[
        "raised-from", "raised-while-handling", "raised-from-none", "torch-write", "dataloader-quota",
        "torch-save", "unrelated",
    ],
)  # fmt: skip
def test_full_disk_is_an_environment_failure(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], kind: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: _EmptyDisk())
    assert classify_failure(catch(act)) == kind


class _EmptyDisk:
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


def write_by_path(folder: Path) -> None:
    torch.save(torch.zeros(1_000_000), folder / "model.pt")


def write_by_file(folder: Path) -> None:
    with (folder / "rows.bin").open("wb") as file:
        file.write(bytes(10_000_000))


def write_by_file_and_wrap_error(folder: Path) -> None:
    try:
        write_by_file(folder)
    except OSError as e:
        raise RuntimeError("saving failed") from e


@pytest.mark.parametrize("write", [write_by_path, write_by_file, write_by_file_and_wrap_error])
def test_failure_record_names_full_disk_and_fix(
    small_disk: Path, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    error = catch(lambda: write(small_disk))
    assert RankResultWriter({"CLUSTERTRAIN_RANK_DIR": str(tmp_path), "RANK": "0"}).record_failure(error) == 78
    record = json.loads((tmp_path / "rank-0.json").read_text())
    assert record["kind"] == "environment"
    assert f"the disk of {small_disk}" in record["error"]["message"]
    assert "fix: free space there" in record["error"]["message"]
