"""A folder of tokens: shards that are mapped into memory, and ``index.json``, which says what they are.

A shard is an array of whole numbers in one dimension, as ``.npy`` (which says its own type) or as bare bytes, ``.bin``,
in the order of bytes of x86 and ARM. Documents lie one after the other, and none goes on in the next shard. A folder
of ``.npy`` files needs no index: each is one document then.

    {"format": "clustertrain-tokens-1", "dtype": "uint16", "largest": 50256,
     "shards": [{"file": "00000.bin", "tokens": 134217728, "ends": "00000.ends.npy"}]}

``ends`` says where documents end, in tokens from the begin of the shard, the end itself not included: a list, or an
``.npy`` file of int64. Without it the shard is one document.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from clustertrain import reading
from clustertrain.errors import ConfigError

INDEX_FILE = "index.json"
TokenDtype = Literal["uint8", "uint16", "uint32"]
DTYPE_BYTES: dict[TokenDtype, int] = {"uint8": 1, "uint16": 2, "uint32": 4}


class TokenShard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: str
    tokens: int | None = None  # None: as many as the file holds
    ends: tuple[int, ...] | str = ""


class ShardIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``largest`` of all tokens; None: not known, and each batch is looked at. ``tokenizer`` is for people."""

    shards: tuple[TokenShard, ...]
    format: Literal["clustertrain-tokens-1"] = "clustertrain-tokens-1"
    dtype: TokenDtype | None = None  # of .bin shards
    largest: int | None = None
    tokenizer: str = ""


def load_index(folder: Path) -> ShardIndex:
    """What ``folder`` holds.

    Raises:
        ConfigError: it is no folder of shards, or its index is not one; names the file and the key.
    """
    if not folder.is_dir():
        raise ConfigError(f"data.path = {str(folder)!r}: no such folder", fix="every node must see it")
    path = folder / INDEX_FILE
    if not path.exists():
        names = sorted(p.name for p in folder.glob("*.npy") if not p.name.endswith(".ends.npy"))
        if not names:
            raise ConfigError(
                f"data.path = {str(folder)!r}: neither {INDEX_FILE} nor .npy files in it",
                fix="make it with `clustertrain data tokenize`; docs/data.md has the format",
            )
        return ShardIndex(shards=tuple(TokenShard(file=name) for name in names))
    try:
        index = reading.read_struct(path, ShardIndex)
    except reading.UnusableFile as e:
        raise ConfigError(e.message, fix="docs/data.md has the format") from e
    if not index.shards:
        raise ConfigError(f"{path}: no shards", fix="the folder is empty: give other data")
    _check_index(path, index)
    return index


def _check_index(path: Path, index: ShardIndex) -> None:
    for shard in index.shards:
        names = [shard.file, *([shard.ends] if isinstance(shard.ends, str) and shard.ends else [])]
        for name in names:
            if Path(name).name != name:
                raise ConfigError(f"{path}: {name!r} is not in the folder itself", fix="name files of this folder")
        if not shard.file.endswith((".npy", ".bin")):
            raise ConfigError(f"{path}: {shard.file!r} is no .npy or .bin file")
        if shard.file.endswith(".bin") and index.dtype is None:
            raise ConfigError(f"{path}: dtype is missing, and {shard.file} does not say its own")


def check_vocabulary(folder: Path, index: ShardIndex, vocab_size: int) -> None:
    """Raises ConfigError where the folder is known to hold tokens that the model has no embedding for."""
    if index.largest is not None and index.largest >= vocab_size:
        raise ConfigError(
            f"data.path = {str(folder)!r} has tokens up to {index.largest}, and model.vocab_size = {vocab_size} takes "
            f"those up to {vocab_size - 1}",
            fix=f"set model.vocab_size = {index.largest + 1} or more, or tokenize the text anew",
        )
