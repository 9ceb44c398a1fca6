"""Folders of tokens: memory-mapped shards and ``index.json``, which describes them.

A shard is a one-dimensional array of integers, as ``.npy`` (which includes its type) or as raw little-endian bytes,
``.bin``. Documents are stored consecutively, and none continues in the next shard. A folder of ``.npy`` files needs no
index; each file is then one document.

    {"format": "clustertrain-tokens-1", "dtype": "uint16", "max_token_id": 50256,
     "shards": [{"file": "00000.bin", "tokens": 134217728, "document_ends": "00000.ends.npy"}]}

``document_ends`` lists the exclusive ends of the documents, in tokens from the start of the shard: a list, or the name
of an ``.npy`` file of int64. Without it the shard is one document. ``answers`` is an ``.npy`` file of bool with one
value per token: only the marked tokens are learned. :mod:`clustertrain.config.parsing.foreign_shards` also reads the
files of Megatron and datatrove.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from clustertrain import reading
from clustertrain.documentation import page_url
from clustertrain.errors import ConfigError

INDEX_FILE = "index.json"
TokenDtype = Literal["uint8", "uint16", "uint32"]
DTYPE_BYTES: dict[TokenDtype, int] = {"uint8": 1, "uint16": 2, "uint32": 4}


class TokenShard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A shard as the index describes it."""

    file: str
    """File name in the folder."""
    tokens: int | None = None
    """Number of tokens; None: all tokens in the file."""
    document_ends: tuple[int, ...] | str = ""
    """Ends of the documents, or the name of a file with them; empty: one document."""
    dtype: TokenDtype | None = None
    """Type of a shard of raw bytes; None: that of the index."""
    answers: str = ""
    """Name of a file that marks the tokens to learn; empty: all."""


class ShardIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``index.json``."""

    shards: tuple[TokenShard, ...]
    format: Literal["clustertrain-tokens-1"] = "clustertrain-tokens-1"
    dtype: TokenDtype | None = None
    """Type of the ``.bin`` shards."""
    max_token_id: int | None = None
    """Largest token id in the shards; None: unknown, so each batch is checked."""
    tokenizer: str = ""
    """Name of the tokenizer, for humans; for one of the tokenizers library, a checksum of its file."""

    @property
    def has_answers(self) -> bool:
        """Whether the shards mark the tokens to learn."""
        return any(shard.answers for shard in self.shards)


def load_index(folder: Path) -> ShardIndex:
    """Load the index of ``folder``.

    Raises:
        ConfigError: ``folder`` has no shards, or its index is invalid; the message has the file and the key.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"data.path = {str(folder)!r}: no such folder", fix="check the path; it must exist on every node"
        )
    path = folder / INDEX_FILE
    if not path.exists():
        names = sorted(p.name for p in folder.glob("*.npy") if not p.name.endswith((".ends.npy", ".answers.npy")))
        if not names:
            raise ConfigError(
                f"data.path = {str(folder)!r}: contains neither {INDEX_FILE} nor .npy, .idx or .ds files",
                fix=f"create it with `clustertrain data tokenize`; {page_url('guides/data')} describes the format",
            )
        return ShardIndex(shards=tuple(TokenShard(file=name) for name in names))
    try:
        index = reading.read_struct(path, ShardIndex)
    except reading.UnusableFile as e:
        raise ConfigError(e.message, fix=f"{page_url('guides/data')} describes the format") from e
    if not index.shards:
        raise ConfigError(f"{path}: no shards", fix="give other data, this folder is empty")
    _check_index(path, index)
    return index


def _check_index(path: Path, index: ShardIndex) -> None:
    for shard in index.shards:
        names = [
            shard.file,
            *([shard.document_ends] if isinstance(shard.document_ends, str) and shard.document_ends else []),
            *([shard.answers] if shard.answers else []),
        ]
        for name in names:
            if Path(name).name != name:
                raise ConfigError(f"{path}: {name!r} is not a file name", fix="name files in this folder")
        if not shard.file.endswith((".npy", ".bin")):
            raise ConfigError(f"{path}: {shard.file!r} is not a .npy or .bin file")
        if shard.file.endswith(".bin") and (shard.dtype or index.dtype) is None:
            raise ConfigError(f"{path}: dtype is missing, and a .bin file such as {shard.file} does not contain it")
    if len({bool(shard.answers) for shard in index.shards}) > 1:
        raise ConfigError(
            f"{path}: only some shards have answers", fix="name a file of answers for each shard, or none"
        )


def check_vocabulary(folder: Path, index: ShardIndex, vocab_size: int) -> None:
    """Raise ConfigError if the folder is known to contain tokens for which the model has no embedding."""
    if index.max_token_id is not None and index.max_token_id >= vocab_size:
        raise ConfigError(
            f"data.path = {str(folder)!r} has tokens up to {index.max_token_id}, but model.vocab_size = {vocab_size} "
            f"allows tokens up to {vocab_size - 1}",
            fix=f"set model.vocab_size = {index.max_token_id + 1} or more, or tokenize the text again",
        )
