"""Files that take the place of others."""

from __future__ import annotations

import errno
import resource
import signal
from pathlib import Path

import pytest

from clustertrain import fsio


def test_a_write_that_fails_names_its_file_and_leaves_the_old_one(tmp_path: Path) -> None:
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
