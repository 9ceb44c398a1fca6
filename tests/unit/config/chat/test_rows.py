"""Rows of chat files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clustertrain.config.chat.rows import list_chat_files, parse_row, read_conversations
from clustertrain.errors import ConfigError
from tests.tiny_tokenizer import chat, write_rows

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def test_three_shapes_of_rows() -> None:
    assert parse_row({"messages": [USER, ANSWER], "id": 7}, "w").trained == (1,)
    assert parse_row({"prompt": "q", "completion": "a"}, "w").messages == [USER, ANSWER]
    both = parse_row({"prompt": [USER, ANSWER, USER], "completion": [ANSWER, USER, ANSWER]}, "w")
    assert len(both.messages) == 6 and both.trained == (3, 5)
    assert parse_row({"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]}, "w").trained == (3,)


def test_columns_of_parquet_that_are_empty_are_absent(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [
        {"messages": [{**USER, "tool_calls": None}, {**ANSWER, "content": None, "tool_calls": ["f"]}], "prompt": None},
        {"messages": [{**USER, "tool_calls": None}, {**ANSWER, "tool_calls": None}], "prompt": None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    first, second = read_conversations(tmp_path / "chats.parquet")
    assert first.messages[1] == {"role": "assistant", "tool_calls": ["f"]}
    assert second.messages == [USER, ANSWER] and second.where == f"{tmp_path}/chats.parquet, row 2"
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"broken.parquet: not a readable Parquet file"):
        list(read_conversations(tmp_path / "broken.parquet"))
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}]), tmp_path / "text.parquet")
    with pytest.raises(ConfigError, match=r"text.parquet: neither messages nor(.|\n)*: text"):
        list(read_conversations(tmp_path / "text.parquet"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([USER, ANSWER], "w: a list instead of an object"),
        ({"text": "a"}, "w: neither messages nor prompt and completion; its keys: 'text'"),
        ({"prompt": "q"}, "w: neither messages"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "w: a pair of a chosen and a rejected answer"),
        ({"messages": []}, "w: messages: an empty list instead of a list of messages"),
        ({"messages": "hello"}, "w: messages: text instead of"),
        ({"messages": [USER]}, "w: no answer: no assistant message"),
        ({"messages": [USER, {**ANSWER, "content": ""}]}, "w: message 2 is an empty answer"),
        ({"prompt": [USER, ANSWER], "completion": [USER]}, "w: no answer: no assistant message after the prompt"),
        ({"messages": [USER, {"role": "bot", "content": "a"}]}, "message 2: unknown role 'bot'(.|\n)*use system"),
        ({"messages": [{"from": "human", "value": "a"}]}, 'message 1: no role(.|\n)*rename "from"'),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text"}]}]}, "content is a list, not text"),
        ({"messages": [{"role": "user", "content": None}, ANSWER]}, "content is nothing, not text"),
        ({"messages": [USER, ANSWER], "tools": "f"}, "tools is text, not a list"),
    ],
)
def test_unusable_row_raises(row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_row(row, "w")


def test_broken_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chats.jsonl", [chat("q", "a")])
    path.write_text(path.read_text() + "\n  \n{broken\n")
    rows = read_conversations(path)
    assert next(rows).where == f"{path}, line 1"
    with pytest.raises(ConfigError, match=r"chats.jsonl, line 4: not JSON: "):
        next(rows)
    path.write_text(json.dumps([chat("q", "a")]))
    with pytest.raises(ConfigError, match=r"line 1: a list instead of an object"):
        next(read_conversations(path))
    path.write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"line 1: not JSON"):
        next(read_conversations(path))


def test_files_of_a_folder_are_sorted_and_special_files_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("c.jsonl", "a.parquet", "b/d.jsonl", ".hidden.jsonl", "readme.md"):
        (tmp_path / name).touch()
    assert [str(p.relative_to(tmp_path)) for p in list_chat_files(tmp_path)] == ["a.parquet", "b/d.jsonl", "c.jsonl"]
    with pytest.raises(ConfigError, match=r"data.path = '.*/none': no such file or folder"):
        list_chat_files(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \.jsonl or \.parquet files"):
        list_chat_files(tmp_path / "empty")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="is a FIFO"):
        next(read_conversations(tmp_path / "fifo"))
