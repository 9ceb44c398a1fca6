"""Data sets saved with ``save_to_disk``: tokens, conversations and text, in place."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from clustertrain.config.chat.rows import list_chat_files, read_conversations
from clustertrain.config.data import DataSpec
from clustertrain.errors import ConfigError
from clustertrain.train.data.text import ByteText
from clustertrain.train.data.token_shards import build_token_datasets
from tests.saved_dataset import save_dataset
from tests.tiny_tokenizer import chat

TOKEN_ROWS = [{"input_ids": list(range(10 * i, 10 * i + 2 + i))} for i in range(5)]


def build_tokens(path: Path, **data: Any) -> Any:
    return build_token_datasets(DataSpec(kind="tokens", path=str(path), seq_len=4, **data), 100, -100)[0]


def test_rows_are_one_stream_of_tokens(tmp_path: Path) -> None:
    windows = build_tokens(save_dataset(tmp_path / "set", TOKEN_ROWS, files=2))
    stream = [token for row in TOKEN_ROWS for token in row["input_ids"]]
    assert len(windows) == (len(stream) - 1) // 4
    assert [t for i in range(len(windows)) for t in windows[i][0].tolist()] == stream[: 4 * len(windows)]
    assert windows.where(1) == f"{tmp_path}/set, row 2"
    again = pickle.loads(pickle.dumps(windows))  # noqa: S301
    assert torch.equal(again[2][1], windows[2][1]) and again.version == windows.version


def test_rows_are_documents_and_labels_say_what_is_learned(tmp_path: Path) -> None:
    rows = [{"input_ids": [7, 8, 9], "labels": [-100, -100, 9], "attention_mask": [1, 1, 1]}, {"input_ids": [1, 2]}]
    rows[1] |= {"labels": [1, 2], "attention_mask": [1, 1]}
    packed = build_tokens(save_dataset(tmp_path / "set", rows), pack=True)
    assert len(packed) == 1
    assert packed[0][0].tolist() == [7, 8, 1, 0] and packed[0][1].tolist() == [-100, 9, 2, -100]


def test_other_data_is_another_version(tmp_path: Path) -> None:
    a, b = (save_dataset(tmp_path / n, [{"input_ids": [1, 2, 3, 4, 5, last]}]) for n, last in (("a", 6), ("b", 7)))
    assert build_tokens(a).version != build_tokens(b).version


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}], "no column input_ids; its columns: text"),
        ([{"input_ids": "abc"}], "input_ids: string, not lists of integers"),
        ([{"input_ids": [0.5]}], "input_ids: list<.*: double>, not lists of integers"),
        ([{"input_ids": [1, None]}], "input_ids: a row without a value"),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], "rows are padded"),
        ([{"input_ids": [1, 2], "labels": [2]}], "labels and input_ids of a row have different lengths"),
        ([{"input_ids": [1, 2], "labels": [2, -100]}], "labels differ from input_ids"),
        ([], "the data set has no rows"),
    ],
)
def test_unsuitable_tokens_are_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokens(save_dataset(tmp_path / "set", rows))


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "set", TOKEN_ROWS, _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(ConfigError, match="an index selects and orders its rows"):
        build_tokens(folder)
    for state, message in (
        ("[]", "not a JSON object"),
        ("{", "state.json"),
        ('{"_data_files": [{"filename": "../other.arrow"}]}', "does not list files of this folder"),
        ('{"_data_files": [{"filename": "lost.arrow"}]}', "lost.arrow: no such file"),
    ):
        (folder / "state.json").write_text(state)
        with pytest.raises(ConfigError, match=message):
            build_tokens(folder)
    (folder / "lost.arrow").write_bytes(b"not arrow")
    with pytest.raises(ConfigError, match="not a readable Arrow file"):
        build_tokens(folder)


def test_split_must_be_named(tmp_path: Path) -> None:
    save_dataset(tmp_path / "set" / "train", [chat("what", "the answer")])
    (tmp_path / "set" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(ConfigError, match="a folder of splits: train, test") as e:
        list(read_conversations(list_chat_files(tmp_path / "set")[0]))
    assert e.value.fix == f"name the folder of one of them: {tmp_path}/set/train"


def test_conversations_and_text_of_rows(tmp_path: Path) -> None:
    rows = [chat("what", "the answer"), chat("hello", "hello there")]
    (path,) = list_chat_files(save_dataset(tmp_path / "chats", rows, files=2))
    assert [c.messages for c in read_conversations(path)] == [row["messages"] for row in rows]
    assert [c.where for c in read_conversations(path)][1] == f"{path}, row 2"
    save_dataset(tmp_path / "text", [{"text": "one"}, {"text": "ü"}])
    text = ByteText(DataSpec(path=str(tmp_path / "text"), seq_len=6))
    assert bytes(text[0][0].tolist()).decode() == "one\nü"
    with pytest.raises(ConfigError, match="no column text"):
        ByteText(DataSpec(path=str(tmp_path / "chats"), seq_len=2))
