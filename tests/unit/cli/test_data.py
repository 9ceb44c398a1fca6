"""``clustertrain data tokenize``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from clustertrain.cli.data import data
from clustertrain.config.parsing.token_shards import ShardIndex, load_index
from clustertrain.errors import ClusterTrainError, ConfigError, UsageError

WORDS = """
def words(text):
    return [1000 * len(word) for word in text.split()]
"""


def tokenized(folder: Path, *options: str) -> tuple[ShardIndex, list[list[int]], str]:
    """The index, the documents, and what was said, of the text in ``folder / "text"``."""
    argv = ["tokenize", str(folder / "text"), "--out", str(folder / "out"), *options]
    done = CliRunner().invoke(data, argv, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    index = load_index(folder / "out")
    documents: list[list[int]] = []
    for shard in index.shards:
        tokens = np.fromfile(folder / "out" / shard.file, dtype=index.dtype)
        ends = np.load(folder / "out" / str(shard.document_ends))
        documents += [tokens[a:b].tolist() for a, b in zip([0, *ends], ends, strict=False)]
    return index, documents, done.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"one\ntwo three\n")
    (tmp_path / "text" / "b.md").write_bytes(b"four")
    return tmp_path


def test_files_as_bytes(folder: Path) -> None:
    index, documents, said = tokenized(folder, "--end", "0")
    assert [bytes(d) for d in documents] == [b"one\ntwo three\n\0", b"four\0"]
    assert (index.dtype, index.max_token_id, index.tokenizer) == ("uint8", ord("w"), "bytes")
    assert "20 tokens in 1 shard of uint8, largest token 119; set model.vocab_size to at least 120" in said


def test_lines_of_some_files_with_a_token_of_their_own(folder: Path) -> None:
    index, documents, _ = tokenized(folder, "--documents", "lines", "--pattern", "*.txt", "--end", "256")
    assert documents == [[*b"one", 256], [*b"two three", 256]]
    assert (index.dtype, index.max_token_id) == ("uint16", 256)


def test_a_tokenizer_of_ones_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "words_of_mine.py").write_text(WORDS)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [*sys.path])
    index, documents, said = tokenized(
        folder, "--tokenizer", "words_of_mine:words", "--documents", "lines", "--shard-tokens", "2", "--json"
    )
    assert documents == [[3000], [3000, 5000], [4000]] and index.dtype == "uint32"
    assert json.loads(said) == {"folder": str(folder / "out"), "shards": 2, "tokens": 4, "max_token_id": 5000}


def test_lines_of_json(folder: Path) -> None:
    for name in ("a.txt", "b.md"):
        (folder / "text" / name).write_text(json.dumps({"body": name}) + "\n")
    assert tokenized(folder, "--documents", "jsonl", "--key", "body")[1] == [[*b"a.txt"], [*b"b.md"]]


def test_a_line_of_json_that_no_reader_takes_is_named(folder: Path) -> None:
    for line, why in (("[" * 100_000, "levels deep"), (f'{{"text": {"9" * 5000}}}', "digits")):
        (folder / "text" / "a.txt").write_text(line + "\n")
        with pytest.raises(ConfigError, match=f"a.txt, line 1: .*{why}"):
            tokenized(folder, "--documents", "jsonl")


def test_half_a_character_in_json_becomes_the_replacement_character(folder: Path) -> None:
    for name in ("a.txt", "b.md"):
        (folder / "text" / name).write_text('{"text": "\\ud83d"}\n')
    assert tokenized(folder, "--documents", "jsonl")[1] == [[*"\ufffd".encode()]] * 2


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (["--tokenizer", "letters"], UsageError, "neither bytes nor package.module"),
        (["--tokenizer", "nowhere_at_all:f"], ConfigError, "no module 'nowhere_at_all'"),
        (["--documents", "jsonl"], ConfigError, "a.txt, line 1: not a JSON object with 'text'"),
        (["--key", "body"], UsageError, "needs JSON lines, but --documents is files"),
        (["--pattern", "*.rst"], ConfigError, "no file matches"),
        (["--dtype", "uint8", "--end", "300"], ConfigError, "uint8 holds 0 to 255"),
    ],
)
def test_what_cannot_be(folder: Path, options: list[str], error: type[ClusterTrainError], said: Any) -> None:
    with pytest.raises(error, match=said):
        tokenized(folder, *options)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("gives", ["text", "text.split()", "None", "[[1, 2]]", "[0.5]"])
def test_a_tokenizer_that_gives_no_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch, gives: str) -> None:
    (folder / "odd_one.py").write_text(f"def tokens(text):\n    return {gives}\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "odd_one", raising=False)
    with pytest.raises(ConfigError, match="not token ids"):
        tokenized(folder, "--tokenizer", "odd_one:tokens")
    assert not (folder / "out").exists()


def test_out_that_cannot_be_a_folder(folder: Path) -> None:
    (folder / "out").touch()
    done = CliRunner().invoke(data, ["tokenize", str(folder), "--out", str(folder / "out")])
    assert done.exit_code == 2 and "is a file" in done.output
    with pytest.raises(ConfigError, match="Not a directory"):
        CliRunner().invoke(
            data, ["tokenize", str(folder), "--out", str(folder / "out" / "below")], catch_exceptions=False
        )
