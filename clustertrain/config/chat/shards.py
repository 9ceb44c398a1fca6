"""Token shards made from conversations by ``data tokenize --documents chat``."""

from __future__ import annotations

from pathlib import Path

from clustertrain.config.chat.tokenizer import TokenizerFiles
from clustertrain.config.parsing.token_shards import INDEX_FILE, ShardIndex
from clustertrain.errors import ConfigError

_FIX = "run `clustertrain data tokenize … --documents chat --tokenizer …` again, with the tokenizer of data.tokenizer"


def has_shards(path: Path) -> bool:
    """Return whether ``path`` is a folder of token shards."""
    return (path / INDEX_FILE).exists()


def check_chat_shards(path: Path, index: ShardIndex, files: TokenizerFiles, key: str) -> None:
    """Raise ConfigError if the shards do not mark answers, or were made with another tokenizer than ``files``."""
    label = f"{key} = {str(path)!r}"
    if not index.has_answers:
        raise ConfigError(f"{label}: shards of text: no tokens are marked as answers", fix=_FIX)
    if index.tokenizer != files.version:
        raise ConfigError(
            f"{label}: made with another tokenizer than {files.path}: {index.tokenizer!r}, not {files.version!r}",
            fix=_FIX,
        )


def check_no_shards(path: Path, key: str) -> None:
    """Raise ConfigError if ``path`` is a folder of token shards, which hold no pairs of answers."""
    if has_shards(path):
        raise ConfigError(
            f"{key} = {str(path)!r}: token shards, which hold no pairs of a chosen and a rejected answer",
            fix="name the files with the pairs, which are tokenized when the run starts",
        )
