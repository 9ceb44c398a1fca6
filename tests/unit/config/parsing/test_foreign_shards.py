"""Token files of Megatron and datatrove."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustertrain.config.data import DataSpec
from clustertrain.config.parsing.foreign_shards import load_shards
from clustertrain.errors import ConfigError
from clustertrain.train.data.token_shards import TokenCorpus, build_token_datasets

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]
STREAM = [t for d in DOCUMENTS for t in d]
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float32": 7, "uint16": 8}


def write_megatron(prefix: Path, sequences: Sequence[Sequence[int]], firsts: Sequence[int], dtype: str = "uint16",
                   **changes: Any) -> Path:  # fmt: skip
    """Write NAME.bin and NAME.idx as Megatron's preprocessing does; ``changes`` replace fields of the index."""
    arrays = [np.array(s, dtype=dtype) for s in sequences]
    prefix.with_suffix(".bin").write_bytes(b"".join(a.tobytes() for a in arrays))
    sizes = np.array([len(a) for a in arrays], dtype=np.int32)
    pointers = np.concatenate(([0], np.cumsum(sizes[:-1] * np.dtype(dtype).itemsize))).astype(np.int64)
    fields = {"magic": b"MMIDIDX\0\0", "version": 1, "code": CODES[dtype], "pointers": pointers, **changes}
    index = fields["magic"] + struct.pack("<QBQQ", fields["version"], fields["code"], len(sizes), len(firsts))
    index += sizes.tobytes() + fields["pointers"].tobytes() + np.array(firsts, dtype=np.int64).tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    return prefix.with_suffix(".idx")


def write_datatrove(path: Path, documents: Sequence[Sequence[int]], size: int = 2, loss: Any = None) -> Path:
    """Write NAME.ds and its companions as datatrove does."""
    path.write_bytes(b"".join(np.array(d, dtype=f"<u{size}").tobytes() for d in documents))
    ends = np.cumsum([len(d) for d in documents]).astype("<u8")
    path.with_name(path.name + ".index").write_bytes(ends.tobytes())
    path.with_name(path.name + ".metadata").write_text(f"gpt2|{size}\n{ends[-1]}\n{ends[-1]} T")
    if loss is not None:
        path.with_name(path.name + ".loss").write_bytes(np.array(loss, dtype=bool).tobytes())
    return path


def documents_of(corpus: TokenCorpus) -> list[list[int]]:
    return [corpus.read(int(a), int(n)).tolist() for a, n in zip(*corpus.documents(), strict=True)]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32"])
def test_megatron_documents_of_several_sequences(tmp_path: Path, dtype: str) -> None:
    sequences = [[5, 6], [7], [8], [9, 10, 11, 12]]
    index = write_megatron(tmp_path / "text_document", sequences, [0, 2, 3, 4], dtype)
    for path in (index, tmp_path):
        corpus = TokenCorpus(path)
        assert len(corpus) == 8 and documents_of(corpus) == DOCUMENTS
        assert corpus.read(2, 5).tolist() == STREAM[2:7] and not corpus.has_answers
        assert corpus.where(3) == "text_document.bin, from token 3 on"
        assert documents_of(pickle.loads(pickle.dumps(corpus))) == DOCUMENTS  # noqa: S301


def test_a_folder_of_megatron_files_is_one_stream(tmp_path: Path) -> None:
    write_megatron(tmp_path / "b", DOCUMENTS[1:], [0, 1, 2], "int32")
    write_megatron(tmp_path / "a", DOCUMENTS[:1], [0, 1])
    corpus = TokenCorpus(tmp_path)
    assert documents_of(corpus) == DOCUMENTS and corpus.read(0, 8).tolist() == STREAM
    train, _ = build_token_datasets(DataSpec(kind="tokens", path=str(tmp_path), seq_len=3), 16, -100)
    assert [t.tolist() for t in train[1]] == [STREAM[3:6], STREAM[4:7]]
    packed, _ = build_token_datasets(DataSpec(kind="tokens", path=str(tmp_path), seq_len=3, pack=True), 16, -100)
    assert sorted(int(t) for i in range(len(packed)) for t in packed[i][1] if t >= 0) == [6, 7, 10, 11, 12]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"TNTIDX\0\0\0"}, "not an index of Megatron"),
        ({"version": 2}, "version 2, and only version 1 is known"),
        ({"code": 5}, "tokens of type 5"),
        ({"code": 99}, "tokens of type 99"),
        ({"pointers": np.array([0, 100, 200], dtype=np.int64)}, "do not follow one another"),
    ],
)
def test_other_indexes_raise(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    index = write_megatron(tmp_path / "x", DOCUMENTS, [0, 1, 2, 3], **changes)
    with pytest.raises(ConfigError, match=message):
        TokenCorpus(index).documents()


def test_damaged_megatron_files_raise(tmp_path: Path) -> None:
    index = write_megatron(tmp_path / "x", DOCUMENTS, [0, 1, 2, 3])
    content, tokens = index.read_bytes(), (tmp_path / "x.bin").read_bytes()
    index.write_bytes(content[:-4])
    with pytest.raises(ConfigError, match=r"x.idx: .* bytes, but 3 sequences and 4 document indices take"):
        load_shards(index)
    index.write_bytes(content)
    (tmp_path / "x.bin").write_bytes(tokens[:-1])
    with pytest.raises(ConfigError, match=r"x.bin: 15 bytes are no whole number of tokens of 2 bytes"):
        load_shards(index)
    (tmp_path / "x.bin").write_bytes(tokens[:-2])
    with pytest.raises(ConfigError, match=r"document ends must ascend up to the shard's 7 tokens"):
        TokenCorpus(index).documents()
    (tmp_path / "x.bin").unlink()
    with pytest.raises(ConfigError, match=r"x.bin: no such file"):
        load_shards(index)
    write_megatron(tmp_path / "y", DOCUMENTS, [0, 2, 1, 3])
    with pytest.raises(ConfigError, match="do not ascend from 0 to the 3 sequences"):
        TokenCorpus(tmp_path / "y.idx").documents()
    with pytest.raises(ConfigError, match=r"neither a folder nor an .idx or .ds file(.|\n)*name .*y.idx"):
        load_shards(tmp_path / "y.bin")


@pytest.mark.parametrize("size", [2, 4])
def test_datatrove_files(tmp_path: Path, size: int) -> None:
    file = write_datatrove(tmp_path / "00000_shuffled.ds", DOCUMENTS, size)
    assert documents_of(TokenCorpus(file)) == documents_of(TokenCorpus(tmp_path)) == DOCUMENTS
    (tmp_path / "00000_shuffled.ds.metadata").unlink()
    assert documents_of(TokenCorpus(file)) == DOCUMENTS  # by the last document's end
    (tmp_path / "00000_shuffled.ds.index").unlink()
    with pytest.raises(ConfigError, match="unknown bytes per token"):
        TokenCorpus(file)
    (tmp_path / "00000_shuffled.ds.metadata").write_text(f"a name|{size}\n8\n8 T")
    assert documents_of(TokenCorpus(file)) == [STREAM]


def test_loss_file_masks_targets(tmp_path: Path) -> None:
    loss = [0, 1, 1, 0, 0, 1, 0, 1]
    write_datatrove(tmp_path / "a.ds", DOCUMENTS, loss=loss)
    corpus = TokenCorpus(tmp_path)
    assert corpus.has_answers and corpus.read_answers(0, 8).tolist() == [bool(x) for x in loss]
    spec = DataSpec(kind="tokens", path=str(tmp_path), seq_len=7)
    windows, _ = build_token_datasets(spec, 16, -1)
    expected = [token if kept else -1 for token, kept in zip(STREAM, loss, strict=True)][1:]
    assert windows[0][1].tolist() == expected
    packed, _ = build_token_datasets(DataSpec(kind="tokens", path=str(tmp_path), seq_len=7, pack=True), 16, -1)
    assert sorted(t for t in packed[0][1].tolist() if t >= 0) == [6, 7, 10, 12]
    write_datatrove(tmp_path / "b.ds", DOCUMENTS)
    with pytest.raises(ConfigError, match=r"only some files have a .loss file"):
        load_shards(tmp_path)
    (tmp_path / "b.ds.loss").write_bytes(b"\1")
    with pytest.raises(ConfigError, match=r"b.ds.loss: 1 bytes for 8 tokens"):
        load_shards(tmp_path)
