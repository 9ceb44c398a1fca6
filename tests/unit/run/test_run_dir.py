"""What of a run's folder is an attempt."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertrain import reading
from clustertrain.run.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    for name in ("1", "2", "10"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    return RunDir(tmp_path)


def test_names_that_are_no_numbers_are_no_attempts(run: RunDir) -> None:
    for name in ("\u00b2", "\u0663", "9" * 200, "x"):
        (run.attempts_folder / name).mkdir()
    assert [a.n for a in run.attempts()] == [1, 2, 10]


def test_a_run_without_the_folder_has_no_attempts(tmp_path: Path) -> None:
    assert RunDir(tmp_path).attempts() == []
    (tmp_path / "attempts").touch()
    assert RunDir(tmp_path).attempts() == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_file_system_that_does_not_tell_is_no_run_without_attempts(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def silent(path: Path) -> Iterator[Path]:
        raise OSError(code, os.strerror(code), str(path))

    # From Python 3.14 on, is_dir answers False to any error.
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    monkeypatch.setattr(Path, "iterdir", silent)
    with pytest.raises(OSError, match="attempts"):
        run.attempts()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", True), ("12", True), ("", False), ("-1", False), ("\u00b2", False), ("\u0663", False), ("9" * 5000, False)],
)
def test_what_is_a_count(text: str, expected: bool) -> None:
    assert reading.is_unsigned_int(text) == expected
