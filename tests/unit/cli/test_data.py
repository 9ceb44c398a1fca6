"""``clustertrain data tokenize``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from clustertrain.cli.data import data
from clustertrain.config.parsing.token_shards import ShardIndex, load_index
from clustertrain.errors import ClusterTrainError, ConfigError, UsageError
from tests.saved_dataset import save_dataset
from tests.tiny_tokenizer import MARKED, byte_level_tokenizer, chat, write_rows, write_tokenizer

TOKENIZER_MODULE = """
def words(text):
    return [1000 * len(word) for word in text.split()]
"""


def tokenize(folder: Path, *options: str) -> tuple[ShardIndex, list[list[int]], str]:
    """Tokenize the text in ``folder / "text"``, and return the index, the documents and the output."""
    argv = ["tokenize", str(folder / "text"), "--output", str(folder / "out"), *options]
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


def test_each_file_is_a_document_of_bytes(folder: Path) -> None:
    index, documents, output = tokenize(folder, "--end", "0")
    assert [bytes(d) for d in documents] == [b"one\ntwo three\n\0", b"four\0"]
    assert (index.dtype, index.max_token_id, index.tokenizer) == ("uint8", ord("w"), "bytes")
    assert "20 tokens in 1 shard of uint8, largest token 119; set model.vocab_size to at least 120" in output


def test_each_line_is_a_document_with_an_end_token(folder: Path) -> None:
    index, documents, _ = tokenize(folder, "--documents", "lines", "--pattern", "*.txt", "--end", "256")
    assert documents == [[*b"one", 256], [*b"two three", 256]]
    assert (index.dtype, index.max_token_id) == ("uint16", 256)


def test_custom_tokenizer_function(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "custom_tokenizer.py").write_text(TOKENIZER_MODULE)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [*sys.path])
    index, documents, output = tokenize(
        folder, "--tokenizer", "custom_tokenizer:words", "--documents", "lines", "--shard-tokens", "2", "--json"
    )
    assert documents == [[3000], [3000, 5000], [4000]] and index.dtype == "uint32"
    assert json.loads(output) == {
        "schema_version": 1,
        "folder": str(folder / "out"),
        "shards": 2,
        "tokens": 4,
        "max_token_id": 5000,
    }


def test_json_lines_use_the_given_key(folder: Path) -> None:
    for name in ("a.txt", "b.md"):
        (folder / "text" / name).write_text(json.dumps({"body": name}) + "\n")
    assert tokenize(folder, "--documents", "jsonl", "--key", "body")[1] == [[*b"a.txt"], [*b"b.md"]]


def test_rows_of_a_saved_dataset_use_the_given_column(folder: Path) -> None:
    shutil.rmtree(folder / "text")
    save_dataset(folder / "text", [{"body": "one"}, {"body": "two"}])
    assert tokenize(folder, "--documents", "rows", "--key", "body")[1] == [[*b"one"], [*b"two"]]
    with pytest.raises(UsageError, match="is a data set saved with save_to_disk, but --documents is files"):
        tokenize(folder)


def test_json_line_that_cannot_be_parsed_is_named(folder: Path) -> None:
    for line, reason in (("[" * 100_000, "levels deep"), (f'{{"text": {"9" * 5000}}}', "digits")):
        (folder / "text" / "a.txt").write_text(line + "\n")
        with pytest.raises(ConfigError, match=f"a.txt, line 1: .*{reason}"):
            tokenize(folder, "--documents", "jsonl")


def test_lone_surrogate_becomes_the_replacement_character(folder: Path) -> None:
    for name in ("a.txt", "b.md"):
        (folder / "text" / name).write_text('{"text": "\\ud83d"}\n')
    assert tokenize(folder, "--documents", "jsonl")[1] == [[*"\ufffd".encode()]] * 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--tokenizer", "letters"], UsageError, "neither bytes, nor a tokenizer.json"),
        (["--tokenizer", "nowhere_at_all:f"], ConfigError, "no module 'nowhere_at_all'"),
        (["--documents", "jsonl"], ConfigError, "a.txt, line 1: not a JSON object with 'text'"),
        (["--key", "body"], UsageError, "needs JSON lines or rows, but --documents is files"),
        (["--pattern", "*.rst"], ConfigError, "no file matches"),
        (["--dtype", "uint8", "--end", "300"], ConfigError, "uint8 holds 0 to 255"),
    ],
    ids=["tokenizer", "no-module", "not-json", "key-without-jsonl", "pattern", "dtype"],
)
def test_invalid_options_and_text_create_nothing(
    folder: Path, options: list[str], error: type[ClusterTrainError], message: str
) -> None:
    with pytest.raises(error, match=message):
        tokenize(folder, *options)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("returned", ["text", "text.split()", "None", "[[1, 2]]", "[0.5]"])
def test_tokenizer_that_returns_no_token_ids_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, returned: str
) -> None:
    (folder / "odd_one.py").write_text(f"def tokens(text):\n    return {returned}\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "odd_one", raising=False)
    with pytest.raises(ConfigError, match="not token ids"):
        tokenize(folder, "--tokenizer", "odd_one:tokens")
    assert not (folder / "out").exists()


def test_out_that_cannot_be_a_folder_is_refused(folder: Path) -> None:
    (folder / "out").touch()
    done = CliRunner().invoke(data, ["tokenize", str(folder), "--output", str(folder / "out")])
    assert done.exit_code == 2 and "is a file" in done.output
    with pytest.raises(ConfigError, match="Not a directory"):
        CliRunner().invoke(
            data, ["tokenize", str(folder), "--output", str(folder / "out" / "below")], catch_exceptions=False
        )


def test_tokenizer_file(folder: Path) -> None:
    write_tokenizer(folder / "t")
    index, documents, output = tokenize(folder, "--tokenizer", str(folder / "t" / "tokenizer.json"), "--end", "1")
    tokenizer = byte_level_tokenizer()
    tokenizer.no_truncation()
    texts = ["one\ntwo three\n", "four"]
    assert documents == [[*tokenizer.encode(t, add_special_tokens=False).ids, 1] for t in texts]
    assert index.dtype == "uint16" and index.tokenizer.startswith("tokenizer.json xxh3:")
    assert not index.has_answers and "uint16" in output


def test_conversations_with_marked_answers(folder: Path) -> None:
    write_tokenizer(folder / "t")
    write_rows(folder / "text" / "chats.jsonl", [chat("hello", "it is late"), chat("what", "the time")])
    index, documents, _ = tokenize(folder, "--documents", "chat", "--tokenizer", str(folder / "t"))
    [shard] = index.shards
    answers = np.load(folder / "out" / shard.answers)
    learned = np.array([t for d in documents for t in d])[answers].tolist()
    text = byte_level_tokenizer().decode(learned, skip_special_tokens=False)
    assert text == "it is late<|im_end|>\nthe time<|im_end|>\n"
    (folder / "mine.jinja").write_text(MARKED)
    options = ("--tokenizer", str(folder / "t"), "--chat-template", str(folder / "mine.jinja"))
    shutil.rmtree(folder / "out")
    assert tokenize(folder, "--documents", "chat", *options)[1] != documents
    (folder / "text" / "chats.jsonl").write_text("{}\n")
    shutil.rmtree(folder / "out")
    with pytest.raises(ConfigError, match="line 1: neither messages"):
        tokenize(folder, "--documents", "chat", "--tokenizer", str(folder / "t"))
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--documents", "chat"), "needs a tokenizer with a chat template, but --tokenizer is bytes"),
        (("--documents", "chat", "--tokenizer", "t", "--end", "3"), "--end has no effect"),
        (("--documents", "chat", "--tokenizer", "t", "--pattern", "*.x"), "--pattern has no effect"),
        (("--documents", "lines", "--chat-template", __file__), "--chat-template needs conversations"),
        (("--tokenizer", "none/tokenizer.json"), "is neither bytes, nor a tokenizer.json"),
    ],
)
def test_options_without_effect_raise(folder: Path, options: tuple[str, ...], message: str) -> None:
    argv = ["tokenize", str(folder / "text"), "--output", str(folder / "out"), *options]
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(data, argv, catch_exceptions=False, standalone_mode=False)
