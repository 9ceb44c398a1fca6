"""Token files of other tools, described as token shards: Megatron's ``.bin`` and ``.idx``, and datatrove's ``.ds``.

Megatron (`megatron/core/datasets/indexed_dataset.py`): NAME.bin holds the tokens, NAME.idx the 9 bytes "MMIDIDX" and
two zeros, the version (uint64, 1), a code for the type of the tokens (uint8), the number of sequences S and that of
document indices D (both uint64), then the tokens of each sequence (int32, S), its first byte (int64, S) and the first
sequence of each document, with the end of the last (int64, D).

datatrove and nanotron (`datatrove/pipeline/tokens/tokenizer.py`): NAME.ds holds the tokens, NAME.ds.index the end of
each document in tokens (uint64), NAME.ds.loss one byte per token, 0 where there is no loss, and the first line of
NAME.ds.metadata is "TOKENIZER|BYTES PER TOKEN". All numbers are little-endian.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from clustertrain import reading
from clustertrain.config.parsing.token_shards import (
    DTYPE_BYTES,
    INDEX_FILE,
    ShardIndex,
    TokenDtype,
    TokenShard,
    load_index,
)
from clustertrain.errors import ConfigError

MEGATRON_SUFFIX, DATATROVE_SUFFIX = ".idx", ".ds"
ENDS_SUFFIX, LOSS_SUFFIX, METADATA_SUFFIX = ".index", ".loss", ".metadata"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
# The signed types have the bytes of the unsigned ones, because token ids are not negative.
_MEGATRON_DTYPES: dict[int, TokenDtype] = {1: "uint8", 8: "uint16", 3: "uint16", 4: "uint32"}
_DATATROVE_DTYPES: dict[str, TokenDtype] = {"2": "uint16", "4": "uint32"}
_MAX_METADATA_BYTES = 1 << 20


def load_shards(path: Path) -> tuple[Path, ShardIndex]:
    """Return the folder of the shards at ``path``, and their index.

    ``path`` is a folder of token shards, a folder of Megatron's or datatrove's files, or one .idx or .ds file.

    Raises:
        ConfigError: there are none, or a file is not what it should be; the message has the file.
    """
    if path.is_file() and path.suffix in (MEGATRON_SUFFIX, DATATROVE_SUFFIX):
        return path.parent, ShardIndex(shards=(_describe(path),))
    if path.is_file():
        fix = f"name {path.with_suffix(MEGATRON_SUFFIX)}" if path.suffix == ".bin" else "name a folder of shards"
        raise ConfigError(f"data.path = {str(path)!r}: neither a folder nor an .idx or .ds file", fix=fix)
    if path.is_dir() and not (path / INDEX_FILE).exists():
        for suffix in (MEGATRON_SUFFIX, DATATROVE_SUFFIX):
            if files := sorted(path.glob(f"*{suffix}")):
                index = ShardIndex(shards=tuple(map(_describe, files)))
                if len({bool(shard.answers) for shard in index.shards}) > 1:
                    raise ConfigError(f"data.path = {str(path)!r}: only some files have a {LOSS_SUFFIX} file")
                return path, index
    return path, load_index(path)


def _describe(file: Path) -> TokenShard:
    return _describe_megatron(file) if file.suffix == MEGATRON_SUFFIX else _describe_datatrove(file)


def _describe_megatron(index: Path) -> TokenShard:
    """Return the shard of an .idx file, whose sizes are compared with those that its header states."""
    header, size = _read_start(index, MEGATRON_HEADER.size), index.stat().st_size
    if len(header) < MEGATRON_HEADER.size or not header.startswith(_MAGIC):
        raise ConfigError(f"{index}: not an index of Megatron: it does not start with MMIDIDX", fix="copy it again")
    _, version, code, sequences, documents = MEGATRON_HEADER.unpack(header)
    if version != 1:
        raise ConfigError(f"{index}: version {version}, and only version 1 is known", fix="preprocess the data again")
    if code not in _MEGATRON_DTYPES:
        raise ConfigError(
            f"{index}: tokens of type {code}", fix="preprocess the data to tokens of 16 or 32 bits, types 8 and 4"
        )
    needed = MEGATRON_HEADER.size + 12 * sequences + 8 * documents  # then the modes of multimodal data may follow
    if size < needed:
        raise ConfigError(
            f"{index}: {size} bytes, but {sequences} sequences and {documents} document indices take {needed}",
            fix="copy it again; it was truncated",
        )
    dtype = _MEGATRON_DTYPES[code]
    data = index.with_suffix(".bin")
    return TokenShard(file=data.name, tokens=_count_tokens(data, dtype), document_ends=index.name, dtype=dtype)


def _describe_datatrove(data: Path) -> TokenShard:
    """Return the shard of a .ds file."""
    ends, loss = data.with_name(data.name + ENDS_SUFFIX), data.with_name(data.name + LOSS_SUFFIX)
    token_bytes = _find_token_bytes(data)
    if token_bytes not in _DATATROVE_DTYPES:
        raise ConfigError(
            f"{data}: {token_bytes or 'unknown'} bytes per token, by the files beside it",
            fix=f"copy it again with its {ENDS_SUFFIX} and {METADATA_SUFFIX} files, or tokenize to 2 or 4 bytes",
        )
    dtype = _DATATROVE_DTYPES[token_bytes]
    tokens = _count_tokens(data, dtype)
    if loss.exists() and loss.stat().st_size != tokens:
        raise ConfigError(
            f"{loss}: {loss.stat().st_size} bytes for {tokens} tokens", fix="copy it again, or tokenize again"
        )
    return TokenShard(
        file=data.name,
        tokens=tokens,
        document_ends=ends.name if ends.exists() else "",
        dtype=dtype,
        answers=loss.name if loss.exists() else "",
    )


def _find_token_bytes(data: Path) -> str:
    """Return the bytes per token: the size of the file by its last document end, otherwise as its metadata says."""
    ends, metadata = data.with_name(data.name + ENDS_SUFFIX), data.with_name(data.name + METADATA_SUFFIX)
    if ends.exists() and ends.stat().st_size >= 8:
        with ends.open("rb") as file:
            file.seek(-8, os.SEEK_END)
            (tokens,) = struct.unpack("<Q", file.read(8))
        return f"{data.stat().st_size / max(tokens, 1):g}"
    if not metadata.exists():
        return ""
    first_line = _read_start(metadata, _MAX_METADATA_BYTES).partition(b"\n")[0].decode(errors="replace")
    return first_line.rpartition("|")[2] if "|" in first_line else "2"  # old versions wrote only two bytes


def _count_tokens(data: Path, dtype: TokenDtype) -> int:
    if not data.is_file():
        raise ConfigError(f"{data}: no such file", fix="copy it to the folder of its index")
    size, token_bytes = data.stat().st_size, DTYPE_BYTES[dtype]
    if size % token_bytes:
        raise ConfigError(
            f"{data}: {size} bytes are no whole number of tokens of {token_bytes} bytes", fix="copy it again"
        )
    return size // token_bytes


def _read_start(path: Path, count: int) -> bytes:
    try:
        with reading.open_regular(path) as file:
            return file.read(count)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}", fix="use files that every node can read") from e
