"""Disks of a storm: a small disk image per home, which can be full or read-only for a while. Needs root."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from tests.harness.chaos_slurm import testbed

SIZE_MIB = 256
INODES = 16384  # far more than the files of a run, and few enough to use up in a second


def _mount(*argv: str) -> None:
    result = testbed.run(*argv)
    if result.returncode:
        raise testbed.TestbedFailed(f"{' '.join(argv)}: {result.stderr}")


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """Mount a separate disk at ``folder``, which must not exist."""
    folder.mkdir(parents=True)
    image = folder.with_suffix(".image")
    with image.open("wb") as f:
        f.truncate(SIZE_MIB << 20)
    # Not a tmpfs, which submit rejects because other nodes cannot see it.
    _mount("mkfs.ext4", "-q", "-F", "-m", "0", "-N", str(INODES), "-O", "^has_journal", str(image))
    _mount("mount", "-o", "loop", str(image), str(folder))
    try:
        yield folder
    finally:
        testbed.run("umount", "--lazy", str(folder))


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill the disk of ``folder`` completely."""
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as f:
            for block in (bytes(1 << 20), bytes(1 << 12), bytes(1)):
                _fill(f, block)
        yield
    finally:
        filler.unlink(missing_ok=True)


def _fill(file: FileIO, block: bytes) -> None:
    while True:
        try:
            if file.write(block) < len(block):
                return
        except OSError:
            return


@contextmanager
def no_inodes(folder: Path) -> Iterator[None]:
    """Use up the inodes of the disk of ``folder``: no file can be created, but existing files can grow."""
    fillers = folder / "fillers"
    fillers.mkdir()
    try:
        with suppress(OSError):
            for n in itertools.count():
                os.close(os.open(fillers / str(n), os.O_CREAT | os.O_WRONLY))
        yield
    finally:
        shutil.rmtree(fillers)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make ``folder`` read-only; files that are already open remain writable."""
    _mount("mount", "--bind", str(folder), str(folder))
    try:
        _mount("mount", "-o", "remount,ro,bind", str(folder))
        yield
    finally:
        testbed.run("umount", "--lazy", str(folder))
