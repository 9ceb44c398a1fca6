"""Which entries of a run folder are attempts."""

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


def test_folders_without_a_number_are_not_attempts(run: RunDir) -> None:
    for name in ("\u00b2", "\u0663", "9" * 200, "x"):
        (run.attempts_folder / name).mkdir()
    assert [a.n for a in run.attempts()] == [1, 2, 10]


def test_run_without_the_attempts_folder_has_no_attempts(tmp_path: Path) -> None:
    assert RunDir(tmp_path).attempts() == []
    (tmp_path / "attempts").touch()
    assert RunDir(tmp_path).attempts() == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_unreadable_attempts_folder_is_an_error(run: RunDir, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def failing_iterdir(path: Path) -> Iterator[Path]:
        raise OSError(code, os.strerror(code), str(path))

    # From Python 3.14 on, is_dir answers False to any error.
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    monkeypatch.setattr(Path, "iterdir", failing_iterdir)
    with pytest.raises(OSError, match="attempts"):
        run.attempts()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", True), ("12", True), ("", False), ("-1", False), ("\u00b2", False), ("\u0663", False), ("9" * 5000, False)],
    ids=["zero", "twelve", "empty", "negative", "superscript", "arabic-digit", "5000-digits"],
)
def test_is_unsigned_int(text: str, expected: bool) -> None:
    assert reading.is_unsigned_int(text) == expected
