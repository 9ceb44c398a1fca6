"""Disks of a storm: a small one for each home, in a file, filled up or read-only for a while. Needs root."""

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
INODES = 16384  # many more than a run has files, and few enough to be used up in a second


def _mount(*argv: str) -> None:
    done = testbed.run(*argv)
    if done.returncode:
        raise testbed.TestbedFailed(f"{' '.join(argv)}: {done.stderr}")


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """A disk of its own at ``folder``, which must not exist yet."""
    folder.mkdir(parents=True)
    image = folder.with_suffix(".image")
    with image.open("wb") as f:
        f.truncate(SIZE_MIB << 20)
    # Not a disk in memory: submit knows that other nodes could not see one.
    _mount("mkfs.ext4", "-q", "-F", "-m", "0", "-N", str(INODES), "-O", "^has_journal", str(image))
    _mount("mount", "-o", "loop", str(image), str(folder))
    try:
        yield folder
    finally:
        testbed.run("umount", "--lazy", str(folder))


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """No byte is left on the disk that ``folder`` lies on."""
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
    """No file can be made on the disk that ``folder`` lies on; there is room in those that exist."""
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
    """Whatever is opened in ``folder`` from now on cannot be written; what is open already still can."""
    _mount("mount", "--bind", str(folder), str(folder))
    try:
        _mount("mount", "-o", "remount,ro,bind", str(folder))
        yield
    finally:
        testbed.run("umount", "--lazy", str(folder))
