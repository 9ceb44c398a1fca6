"""Byte-level text, the default dataset of the built-in trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from clustertrain.config.data import DataSpec
from clustertrain.config.parsing.saved_datasets import TEXT_COLUMN, is_saved_dataset, read_texts
from clustertrain.errors import ConfigError
from clustertrain.train.data.text_files import STDLIB, list_files


def load_corpus(spec: DataSpec, min_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return all bytes of the corpus, up to ``spec.max_bytes``.

    Raises:
        ConfigError: there are fewer than ``min_bytes``.
    """
    corpus_bytes = np.frombuffer(b"".join(_read_chunks(spec)), dtype=np.uint8)
    if corpus_bytes.size < min_bytes:
        raise ConfigError(
            f"data.path = {spec.path!r}: {corpus_bytes.size} bytes, and one sample needs {min_bytes}",
            fix="lower data.seq_len or add text",
        )
    return corpus_bytes


def _read_chunks(spec: DataSpec) -> Iterator[bytes]:
    remaining = spec.max_bytes
    for piece in _read_pieces(spec):
        data = piece[:remaining]
        remaining -= len(data)
        yield data
        if remaining <= 0:
            return


def _read_pieces(spec: DataSpec) -> Iterator[bytes]:
    """Yield the files of the corpus, or each row's text of a saved data set as a line."""
    path = Path(spec.path).expanduser()
    if spec.path and is_saved_dataset(path):
        yield from (text + b"\n" for text in read_texts(path, TEXT_COLUMN))
    else:
        yield from (file.read_bytes() for file in list_files(spec))


def compute_version(data: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """Return a checksum that identifies the text."""
    return f"xxh3:{xxhash.xxh3_64_hexdigest(data.data)}"


class ByteText(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples (inputs, targets), both int64 byte ids (seq_len,).

    Inputs are the bytes from ``i * seq_len`` on; targets are the same bytes shifted by one.
    """

    is_stream = True

    def __init__(self, spec: DataSpec) -> None:
        """Load the corpus.

        Raises:
            ConfigError: the corpus is shorter than one sample.
        """
        self.name = f"data.path = {spec.path or STDLIB!r}"
        self._seq_len = spec.seq_len
        self._bytes = load_corpus(spec, spec.seq_len + 1)
        self.version = compute_version(self._bytes)

    def __len__(self) -> int:
        return (self._bytes.size - 1) // self._seq_len

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = i * self._seq_len
        tokens = torch.from_numpy(self._bytes[start : start + self._seq_len + 1].astype(np.int64))
        return tokens[:-1], tokens[1:]

    def where(self, i: int) -> str:
        """Return the byte position of sample ``i`` as text."""
        return f"from byte {i * self._seq_len} on"


class BytePairs(Dataset[tuple[tuple[torch.Tensor, torch.Tensor], int]]):
    """Samples ((first, second), i): two consecutive passages of ``seq_len`` bytes as int64 ids."""

    is_stream = True

    def __init__(self, spec: DataSpec) -> None:
        """Load the corpus.

        Raises:
            ConfigError: the corpus is shorter than one pair.
        """
        self.name = f"data.path = {spec.path or STDLIB!r}"
        self._seq_len = spec.seq_len
        self._bytes = load_corpus(spec, 2 * spec.seq_len)
        self.version = compute_version(self._bytes)

    def __len__(self) -> int:
        return self._bytes.size // (2 * self._seq_len)

    def __getitem__(self, i: int) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
        start = i * 2 * self._seq_len
        pair = torch.from_numpy(self._bytes[start : start + 2 * self._seq_len].astype(np.int64))
        return (pair[: self._seq_len], pair[self._seq_len :]), i

    def where(self, i: int) -> str:
        """Return the byte position of pair ``i`` as text."""
        return f"from byte {i * 2 * self._seq_len} on"
