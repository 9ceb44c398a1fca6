"""Document ends of token shards, from the file formats that :mod:`token_shards` and :mod:`foreign_shards` describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from clustertrain.config.parsing.foreign_shards import ENDS_SUFFIX, MEGATRON_HEADER, MEGATRON_SUFFIX
from clustertrain.config.parsing.token_shards import DTYPE_BYTES, TokenDtype
from clustertrain.documentation import page_url
from clustertrain.errors import ConfigError

EndsArray = np.ndarray[Any, np.dtype[Any]]


def read_document_ends(path: Path, dtype: TokenDtype | None) -> EndsArray:
    """Return the end of each document in tokens, from a file of any of the formats.

    Args:
        dtype: type of the tokens, in whose bytes Megatron counts.

    Raises:
        ConfigError: the file is not readable as its suffix says.
    """
    try:
        if path.suffix == ENDS_SUFFIX:
            return np.fromfile(path, dtype="<u8").astype(np.int64)
        if path.suffix == MEGATRON_SUFFIX and dtype is not None:
            return _read_megatron_ends(path, dtype)
        ends: EndsArray = np.load(path, mmap_mode="r", allow_pickle=False)
        return ends
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"{path}: not an array of document ends: {e}", fix=f"see {page_url('guides/data')} for the format"
        ) from e


def _read_megatron_ends(path: Path, dtype: TokenDtype) -> EndsArray:
    """Return the ends of the documents, each one or several sequences that follow one another in the data."""
    with path.open("rb") as file:
        _, _, _, sequences, documents = MEGATRON_HEADER.unpack(file.read(MEGATRON_HEADER.size))
        lengths = np.fromfile(file, dtype="<i4", count=sequences).astype(np.int64)
        pointers = np.fromfile(file, dtype="<i8", count=sequences)
        firsts = np.fromfile(file, dtype="<i8", count=documents)
    sequence_ends = np.concatenate(([0], np.cumsum(lengths)))
    if not np.array_equal(pointers, sequence_ends[:-1] * DTYPE_BYTES[dtype]):
        raise ConfigError(
            f"{path}: the sequences do not follow one another in the data, from its first byte on",
            fix="merge or preprocess the data again",
        )
    if documents < 2 or firsts[0] != 0 or firsts[-1] != sequences or bool((np.diff(firsts) < 0).any()):
        raise ConfigError(
            f"{path}: the document indices do not ascend from 0 to the {sequences} sequences",
            fix="preprocess the data again",
        )
    ends: EndsArray = sequence_ends[firsts[1:]]
    return ends
