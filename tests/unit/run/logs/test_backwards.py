"""Where a log is read from: its last lines, or the lines since a time."""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path

import pytest

from clustertrain.run.logs import backwards
from clustertrain.run.logs.backwards import find_last, find_since

NOON = datetime.datetime(2026, 1, 31, 12, 0, 0).timestamp()


def write(tmp_path: Path, text: bytes, written: float = NOON) -> Path:
    path = tmp_path / "rank-0.log"
    path.write_bytes(text)
    os.utime(path, (written, written))
    return path


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 16])
@pytest.mark.parametrize("text", [b"", b"\n", b"a", b"a\n", b"a\r\nbb\r\n\r\nccc", b"1%\r2%\r\n\n3\r", b"\r\r\n\r"])
def test_last_lines_of_any_text_and_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, text: bytes
) -> None:
    monkeypatch.setattr(backwards, "BLOCK_BYTES", block)
    path = write(tmp_path, text)
    lines = re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+", text)
    for count in range(len(lines) + 2):
        start, found = find_last(path, count)
        assert text[start:] == b"".join(lines[max(0, len(lines) - count) :])
        assert found == min(count, len(lines))


def test_last_lines_that_match(tmp_path: Path) -> None:
    path = write(tmp_path, b"loss 3\nother\nloss 2\nloss 1\nend")
    assert find_last(path, 2, re.compile("loss")) == (13, 2)
    assert find_last(path, 9, re.compile("^loss")) == (0, 3)
    assert find_last(path, 1, re.compile("none")) == (30, 0)


def test_endless_line_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backwards, "BLOCK_BYTES", 10)
    monkeypatch.setattr(backwards, "MAX_LINE_BYTES", 20)
    path = write(tmp_path, b"x" * 1000)
    assert 0 < 1000 - find_last(path, 1).start <= 40


@pytest.mark.parametrize(
    "line",
    [
        b"2026-01-31 11:30:00,123 INFO x",
        b"2026-01-31T11:30:00.5 x",
        b"[2026-01-31 11:30:00] x",
        b"INFO:root:2026-01-31 11:30:00 x",
        b"[rank0]:I0131 11:30:00.123 file.py:1] x",
        b"11:30:00  step 5/10",
        b"[11:30:00] x",
    ],
)
def test_formats_of_times(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path, b"before\n" + line + b"\nafter\n")
    assert find_since(path, NOON - 1800.0) == 0
    assert find_since(path, NOON - 1799.0) == len(path.read_bytes())
    later = write(tmp_path, b"10:00:00 old\n  detail\n" + line + b"\nafter\n")
    assert find_since(later, NOON - 1800.0) == len(b"10:00:00 old\n  detail\n")


def test_zone_of_a_time(tmp_path: Path) -> None:
    utc = datetime.datetime.fromtimestamp(NOON - 60, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
    path = write(tmp_path, f"{utc}Z one\n".encode())
    assert find_since(path, NOON - 60) == 0 and find_since(path, NOON - 59) == len(path.read_bytes())


def test_times_without_a_date_go_back_over_midnight(tmp_path: Path) -> None:
    midnight = NOON - 12 * 3600.0
    path = write(tmp_path, b"23:00:00 a\n23:30:00 b\n00:10:00 c\n", written=midnight + 601)
    assert find_since(path, midnight - 1800.0) == 11
    assert find_since(path, midnight) == 22
    assert find_since(path, midnight - 3 * 3600.0) == 0


@pytest.mark.parametrize("text", [b"no time\n", b"99:99:99 x\n", b"2026-99-99 10:00:00\n", b"elapsed 00:00:10\n", b""])
def test_log_without_times(tmp_path: Path, text: bytes) -> None:
    path = write(tmp_path, text)
    assert find_since(path, NOON - 60) is None
    assert find_since(path, NOON + 60) == len(text), "nothing was written since"


def test_search_for_a_time_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backwards, "MAX_UNTIMED_BYTES", 100)
    path = write(tmp_path, b"11:00:00 a\n" + b"x\n" * 200 + b"11:59:00 b\n")
    assert find_since(path, NOON - 4000) == 411
