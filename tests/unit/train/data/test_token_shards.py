"""Token shards: writing, memory mapping, windows and packing."""

from __future__ import annotations

import errno
import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clustertrain.config.data import DataSpec
from clustertrain.config.parsing.token_shards import INDEX_FILE, load_index
from clustertrain.errors import ConfigError
from clustertrain.train.data.token_shards import PackedTokens, TokenCorpus, TokenWindows, build_token_datasets
from clustertrain.train.data.tokenize import write

DOCUMENTS = [list(range(100, 130)), [7], list(range(5)), [], list(range(40, 60)), [1, 2]]
STREAM = [t for d in DOCUMENTS for t in d]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "shards", DOCUMENTS, dtype="uint16", shard_tokens=32)
    return tmp_path / "shards"


def spec(folder: Path, **more: Any) -> DataSpec:
    return DataSpec(kind="tokens", path=str(folder), **{"seq_len": 8, **more})


def test_written_shards_are_read_back(folder: Path) -> None:
    index = load_index(folder)
    assert [(s.file, s.tokens) for s in index.shards] == [("00000.bin", 36), ("00001.bin", 22)]
    assert index.max_token_id == 129 and index.dtype == "uint16"
    corpus = TokenCorpus(folder)
    assert len(corpus) == len(STREAM)
    assert corpus.read(0, len(STREAM)).tolist() == STREAM  # over several shards
    assert corpus.read(30, 4).tolist() == STREAM[30:34]
    starts, lengths = corpus.documents()
    assert [STREAM[b : b + n] for b, n in zip(starts, lengths, strict=True)] == [d for d in DOCUMENTS if d]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=type)
@pytest.mark.parametrize("existed", [False, True])
def test_interrupted_write_leaves_nothing(tmp_path: Path, error: BaseException, existed: bool) -> None:
    out = tmp_path / "new" / "shards"
    if existed:
        out.mkdir(parents=True)

    def failing_documents() -> Iterator[list[int]]:
        yield from DOCUMENTS
        assert [p.name for p in out.glob("*.bin")] == ["00000.bin"]
        raise type(error)(*error.args)

    with pytest.raises(type(error)) as raised:
        write(out, failing_documents(), dtype="uint16", shard_tokens=40)
    assert out.exists() == existed and list(tmp_path.rglob("*.*")) == []
    if isinstance(raised.value, OSError):
        assert raised.value.filename == str(out)
    assert write(out, DOCUMENTS, dtype="uint16", shard_tokens=40) == load_index(out)


def test_leftovers_of_a_killed_write_raise(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not empty"):
        write(folder, DOCUMENTS)
    (folder / INDEX_FILE).rename(folder / ".index.json.77-ab")
    with pytest.raises(ConfigError, match=r"shards without an index(.|\n)*remove the folder"):
        write(folder, DOCUMENTS)
    (folder / "mine.txt").touch()
    with pytest.raises(ConfigError, match="not empty"):
        write(folder, DOCUMENTS)


def test_shards_are_memory_mapped_also_after_pickling(folder: Path) -> None:
    corpus = TokenCorpus(folder)
    assert all(isinstance(m, np.memmap) for m in corpus._maps)
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 4000 and isinstance(pickle.loads(pickled)._maps[0], np.memmap)  # noqa: S301


def test_samples_are_windows_of_the_stream(folder: Path) -> None:
    windows = TokenWindows(TokenCorpus(folder), 8)
    assert len(windows) == (len(STREAM) - 1) // 8
    for i in range(len(windows)):
        inputs, targets = windows[i]
        assert inputs.dtype == torch.int64
        assert (inputs.tolist(), targets.tolist()) == (STREAM[8 * i : 8 * i + 8], STREAM[8 * i + 1 : 8 * i + 9])
    assert windows.where(0) == "00000.bin, from token 0 on"


def test_packed_targets_stay_within_documents(folder: Path) -> None:
    packed, validation = build_token_datasets(spec(folder, pack=True), None, -1)
    assert isinstance(packed, PackedTokens) and validation is None
    pairs = []
    for i in range(len(packed)):
        inputs, targets = packed[i]
        assert inputs.shape == targets.shape == (8,)
        pairs += [(a, b) for a, b in zip(inputs.tolist(), targets.tolist(), strict=True) if b != -1]
    assert sorted(pairs) == sorted(p for d in DOCUMENTS for p in itertools.pairwise(d))


def test_packed_samples_say_where_documents_start(folder: Path) -> None:
    plain, _ = build_token_datasets(spec(folder, pack=True), None, -1)
    packed, _ = build_token_datasets(spec(folder, pack=True, attention="document"), None, -1)
    assert packed.version == plain.version  # the samples are the same
    for i in range(len(packed)):
        inputs, targets = packed[i]
        assert torch.equal(inputs["tokens"], plain[i][0]) and torch.equal(targets, plain[i][1])
        starts = inputs["document_starts"].tolist()
        begins = sorted(set(starts))
        assert begins[0] == 0 and all(starts[b] == b for b in begins)
        for begin, end in itertools.pairwise([*begins, len(starts)]):
            assert starts[begin:end] == [begin] * (end - begin)
            part = [*inputs["tokens"][begin:end].tolist(), int(targets[end - 1])]
            is_padding = targets[begin] == -1
            assert is_padding or any(
                part == d[k : k + len(part)] for d in DOCUMENTS for k in range(len(d) - len(part) + 1)
            )


def test_packed_validation_split_keeps_documents_whole(tmp_path: Path) -> None:
    documents = [[i] * (3 + i % 5) for i in range(60)]
    write(tmp_path / "s", documents, shard_tokens=50)
    parts = build_token_datasets(spec(tmp_path / "s", pack=True, validation=0.2), None, -100)
    targets_of_parts = [{int(t) for i in range(len(p)) for t in p[i][1] if t != -100} for p in parts]
    assert not targets_of_parts[0] & targets_of_parts[1]
    assert targets_of_parts[0] | targets_of_parts[1] == set(range(60)) and len(targets_of_parts[1]) == 12
    assert (
        parts[0].version
        == parts[1].version
        != build_token_datasets(spec(tmp_path / "s", pack=True), None, -100)[0].version
    )


def test_validation_path_names_other_shards(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", [list(range(20))])
    for pack in (False, True):
        _, validation = build_token_datasets(
            spec(folder, validation_path=str(tmp_path / "other"), pack=pack), None, -100
        )
        seen = {int(t) for i in range(len(validation)) for t in validation[i][0]}
        assert seen == set(range(19 if pack else 16)) and validation.name.endswith("other'")


def test_npy_folder_needs_no_index(tmp_path: Path) -> None:
    for name, dtype in (("b.npy", np.uint32), ("a.npy", np.uint16)):
        np.save(tmp_path / name, np.arange(6, dtype=dtype))
    corpus = TokenCorpus(tmp_path)
    assert corpus.read(4, 4).tolist() == [4, 5, 0, 1]
    assert corpus.documents()[1].tolist() == [6, 6]


def test_document_ends_can_be_in_the_index(tmp_path: Path) -> None:
    np.arange(6, dtype=np.uint32).tofile(tmp_path / "x.bin")
    index = {
        "format": "clustertrain-tokens-1",
        "dtype": "uint32",
        "shards": [{"file": "x.bin", "document_ends": [2, 6]}],
    }
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    assert TokenCorpus(tmp_path).documents()[0].tolist() == [0, 2]


def test_version_changes_with_the_tokens(folder: Path) -> None:
    before = TokenCorpus(folder).version
    assert TokenCorpus(folder).version == before
    path = folder / "00000.bin"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    assert TokenCorpus(folder).version != before


def test_tokens_beyond_the_vocabulary_raise(folder: Path) -> None:
    build_token_datasets(spec(folder), 130, -100)
    with pytest.raises(ConfigError, match=r"tokens up to 129, but model.vocab_size = 129 allows tokens up to 128"):
        build_token_datasets(spec(folder), 129, -100)


def edit_first_shard(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    index["shards"][0].update(changes)
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 35}, "36 tokens, but index.json lists 35"),
        ({"document_ends": [3, 2]}, "document ends must ascend up to the shard's 36 tokens"),
        ({"document_ends": [3, 35]}, "up to the shard's 36 tokens"),
        ({"document_ends": "nothing.npy"}, "not an array of document ends"),
        ({"file": "../00000.bin"}, "is not a file name"),
        ({"file": "00009.bin"}, "not a shard of tokens"),
        ({"file": "a.txt"}, r"not a \.npy or \.bin file"),
        ({"width": 3}, "unknown field `width`"),
    ],
    ids=["token count", "descending ends", "short ends", "no ends file", "outside", "no file", "suffix", "unknown key"],
)
def test_damaged_shard_folder_raises(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_first_shard(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        TokenCorpus(folder).documents()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), np.uint16), "store tokens in one dimension"),
        (np.zeros(3, np.float32), "float32 of shape"),
        (np.array([{}, {}]), "not a shard of tokens"),
    ],
    ids=["2-D", "float", "object"],
)
def test_npy_of_other_shape_or_dtype_raises(tmp_path: Path, array: Any, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ConfigError, match=message):
        TokenCorpus(tmp_path)


def test_too_few_tokens_or_documents_raise(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"58 tokens, and one sample needs data.seq_len = 58"):
        build_token_datasets(spec(folder, seq_len=58), None, -100)
    with pytest.raises(ConfigError, match="leaves 0 for validation"):
        build_token_datasets(spec(folder, pack=True, validation=0.01), None, -100)
    with pytest.raises(ConfigError, match=r"neither index.json nor .npy, .idx or .ds files"):
        TokenCorpus(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        TokenCorpus(tmp_path / "nowhere")
    write(tmp_path / "single", [[1], [2]])
    with pytest.raises(ConfigError, match="no document has two tokens"):
        build_token_datasets(spec(tmp_path / "single", pack=True), None, -100)


def test_invalid_documents_raise_on_write(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not empty"):
        write(folder, DOCUMENTS)
    with pytest.raises(ConfigError, match="document 1 has the token 300: uint8 holds 0 to 255"):
        write(tmp_path / "a", [[1], [300]], dtype="uint8")
    with pytest.raises(ConfigError, match="has the token -1"):
        write(tmp_path / "b", [[-1]])
    with pytest.raises(ConfigError, match="no document has tokens"):
        write(tmp_path / "c", [[], []])
    assert not (tmp_path / "a" / INDEX_FILE).exists()
