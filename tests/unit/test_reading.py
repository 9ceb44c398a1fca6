"""Files from others, of any kind, size and depth: readers never block on them, read without limit, or recurse."""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clustertrain import fsio, reading
from clustertrain.reading import MAX_DEPTH, UnusableFile


def make_special_file(folder: Path, kind: str) -> Path:
    path = folder / "odd"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "points to itself":
        path.symlink_to("odd")
    return path


@pytest.mark.parametrize("kind", ["FIFO", "folder", "socket", "device", "points to itself"])
def test_special_files_are_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = make_special_file(tmp_path, kind)
    for read in (reading.read_bytes, fsio.read_json, lambda p: list(fsio.read_jsonl(p))):
        with pytest.raises(UnusableFile) as e:
            read(path)
        assert str(path) in e.value.message and kind in e.value.message and e.value.fix
    assert fsio.poll_json(path) is None and fsio.read_jsonl_tail(path, 100) == []


def test_file_replaced_by_a_folder_before_open_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "odd"
    path.write_text("{}")
    before, real_open = len(list(Path("/proc/self/fd").iterdir())), os.open

    def open_after_replacement(name: Path, flags: int) -> int:
        path.unlink()
        path.mkdir()
        return real_open(name, flags)

    monkeypatch.setattr(os, "open", open_after_replacement)
    with pytest.raises(UnusableFile, match="is a folder"):
        reading.read_bytes(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("[1]")
    (tmp_path / "b").symlink_to("a")
    assert fsio.read_json(tmp_path / "b") == [1]


def test_pipe_is_read_if_allowed(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(b"x" * 100_000))
    writer.start()
    assert reading.read_bytes(path, allow_fifo=True) == b"x" * 100_000
    writer.join()


def test_missing_file(tmp_path: Path) -> None:
    assert fsio.read_json(tmp_path / "none") is None and list(fsio.read_jsonl(tmp_path / "none")) == []
    with pytest.raises(FileNotFoundError):
        reading.read_bytes(tmp_path / "none")


def test_file_of_50_gib_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 50 << 30)
    with pytest.raises(UnusableFile, match="larger than 32 MiB"):
        reading.read_bytes(path)


def test_limit_applies_to_the_bytes_read(tmp_path: Path) -> None:
    """The reported size does not matter: files in /proc report none."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert reading.read_bytes(path, 100) == b"x" * 100
    with pytest.raises(UnusableFile, match="larger than"):
        reading.read_bytes(path, 99)
    with pytest.raises(UnusableFile, match="larger than"):
        reading.read_bytes(Path("/proc/self/status"), 10)
    assert b"Pid:" in reading.read_bytes(Path("/proc/self/status"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested"),
        ('{"a":' * 900 + "1" + "}" * 900, "nested"),
        ("9" * 5000, "digits"),
        ('{"a": 1', "delimiter"),
    ],
    ids=["brackets", "too-deep-lists", "too-deep-objects", "digits", "truncated"],
)
def test_json_that_breaks_parsers_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UnusableFile) as e:
        fsio.read_json(path)
    assert reason in e.value.message and path.name in e.value.message
    path.write_text(f'{{"a": 1}}\n{text}\n{{"a": 2}}\n')
    assert list(fsio.read_jsonl(path)) == [{"a": 1}, {"a": 2}]


def test_json_of_the_maximum_depth_is_read() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert reading.parse_json(text) == json.loads(text)
    wide = json.dumps([[[i]] for i in range(1000)])
    assert len(reading.parse_json(wide)) == 1000


def test_lone_surrogate_is_replaced() -> None:
    assert reading.parse_json(r'{"\ud800": ["\uDFFFx", "\ud83d\ude42"]}') == {"\ufffd": ["\ufffdx", "🙂"]}


def test_struct_with_deep_json_is_refused(tmp_path: Path) -> None:
    class AnyStruct(msgspec.Struct):
        any: Any

    path = tmp_path / "file.json"
    path.write_text('{"any": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(UnusableFile, match="nested"):
        reading.read_struct(path, AnyStruct)
    path.write_text('{"any": 7}')
    assert reading.read_struct(path, AnyStruct).any == 7


def test_only_a_line_that_is_too_long_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    long = b'{"a": "' + b"x" * reading.MAX_LINE_BYTES + b'"}'
    path.write_bytes(b'{"a": 1}\n' + long + b'\n{"a": 2}\n{"a": 3')
    assert list(fsio.read_jsonl(path)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(("limit", "expected"), [(9, [3]), (17, [3]), (18, [2, 3]), (27, [1, 2, 3]), (100, [1, 2, 3])])
def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, limit: int, expected: list[int]) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b'{"a": %d}\n' % n for n in (1, 2, 3)))
    assert [line["a"] for line in fsio.read_jsonl(path, limit)] == expected


def test_decompression_bomb_is_refused() -> None:
    bomb = gzip.compress(b"\0" * (1 << 20))
    assert len(reading.decompress(bomb, 1 << 20)) == 1 << 20
    with pytest.raises(ValueError, match="when decompressed"):
        reading.decompress(bomb, (1 << 20) - 1)
    for damaged in (bomb[:-9], b"no gzip", bomb[:-6] + b"xxxxxx"):
        with pytest.raises(ValueError):
            reading.decompress(damaged, 1 << 20)


def test_appender_does_not_read_its_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.touch()
    os.truncate(path, 50 << 30)
    log = fsio.JsonlAppender(path)
    log.append({"a": 1})
    log.close()
    assert fsio.read_jsonl_tail(path, 100) == [{"a": 1}]
