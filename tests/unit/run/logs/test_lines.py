"""Windows of a log: what they hold, where they begin and end, and how much of a long file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain import reading
from clustertrain.run.logs import lines
from clustertrain.run.logs.lines import LogLine, read_after, read_before


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"one\ntwo\r\nthree\nfour")
    return path


def test_last_lines_and_those_before(log: Path) -> None:
    last = read_before(log, None, 2)
    assert last.lines == [(9, "three"), (15, "four")]
    assert (last.start, last.end, last.size) == (9, 15, 19), "the unfinished line is read again"
    earlier = read_before(log, last.start, 9)
    assert earlier.lines == [(0, "one"), (4, "two")] and (earlier.start, earlier.end) == (0, 9)
    assert read_before(log, 0, 9).lines == [] and read_before(log, None, 0).lines == []


def test_windows_of_any_size_give_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 7)
    path = tmp_path / "log"
    texts = [f"{'x' * (i * 5 % 23)}{i}" for i in range(60)]
    path.write_text("\n".join(texts) + "\n")
    for count in (1, 2, 7, 100):
        end, found = None, []
        while True:
            window = read_before(path, end, count)
            found = [line.text for line in window.lines] + found
            if window.start == 0:
                break
            end = window.start
        assert found == texts, count


def test_new_lines_follow_the_unfinished_one(log: Path) -> None:
    end = read_before(log, None, 9).end
    with log.open("ab") as f:
        f.write(b" and more\n10%\r20%\r30%")
    new = read_after(log, end)
    assert new.lines == [(15, "four and more"), (29, "30%")] and new.end == 29
    with log.open("ab") as f:
        f.write(b"\r40%\r\n")
    assert read_after(log, new.end).lines == [LogLine(29, "40%")], "as a terminal shows a progress bar"


def test_replaced_file_is_read_from_its_beginning(log: Path) -> None:
    log.write_bytes(b"new\n")
    assert read_after(log, 15).lines == [(0, "new")]
    assert read_before(log, 15, 5).lines == [(0, "new")]


def test_endless_line_is_split_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    path = tmp_path / "log"
    path.write_bytes(b"x" * 25)
    window = read_before(path, None, 100)
    assert [len(line.text) for line in window.lines] == [10, 10, 5] and window.end == 20
    assert read_after(path, window.end).lines == [(20, "xxxxx")]


def test_invalid_bytes_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe ok\n")
    assert read_before(path, None, 1).lines == [(0, r"\xff\xfe ok")]


def test_end_of_a_long_file_is_read_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    with path.open("wb") as f:
        f.truncate(1 << 34)  # 16 GiB of NUL, which take no space
        f.seek(0, 2)
        f.write(b"\nlast\n")
    window = read_before(path, None, 1)
    assert [line.text for line in window.lines] == ["last"]
    limited = read_before(path, window.start, 5, max_bytes=1 << 17)
    assert sum(len(line.text) for line in limited.lines) <= 1 << 18


def test_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_after(tmp_path / "none", 0)
    with pytest.raises(reading.UnusableFile):
        read_before(tmp_path, None, 1)
