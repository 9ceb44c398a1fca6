"""Byte-level text: the built-in trainer's data set."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from clustertrain.errors import ConfigError
from clustertrain.spec.data import DataSpec

STDLIB = "stdlib"
_NOT_CORPUS = frozenset({"site-packages", "dist-packages", "__pycache__"})


def files(spec: DataSpec) -> list[Path]:
    """The files of the corpus, sorted by their path relative to its folder: no filesystem's own order.

    Raises:
        ConfigError: the path is missing or nothing in it fits the pattern.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if spec.path in ("", STDLIB) else Path(spec.path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ConfigError(f"data.path = {spec.path!r}: no such file or folder", fix="every node must see it")
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Pruned while walking: a site-packages below the standard library can be larger than all of it.
        subfolders[:] = [n for n in subfolders if n not in _NOT_CORPUS]
        found += [p for n in names if (p := Path(folder, n)).match(spec.pattern)]
    if not found:
        raise ConfigError(f"data.path = {spec.path!r}: no file fits data.pattern = {spec.pattern!r}")
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def corpus(spec: DataSpec, needed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """All bytes of the corpus, up to ``spec.max_bytes``. Raises ConfigError for fewer than ``needed``."""
    found = np.frombuffer(b"".join(_chunks(spec)), dtype=np.uint8)
    if found.size < needed:
        raise ConfigError(
            f"data.path = {spec.path!r}: {found.size} bytes are less than one sample of {needed}",
            fix="lower data.seq_len or give more text",
        )
    return found


def _chunks(spec: DataSpec) -> Iterator[bytes]:
    left = spec.max_bytes
    for path in files(spec):
        data = path.read_bytes()[:left]
        left -= len(data)
        yield data
        if left <= 0:
            return


def version_of(data: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """Tells whether it is the same text: a checksum."""
    return f"xxh3:{xxhash.xxh3_64_hexdigest(data.data)}"


class ByteText(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i is (inputs, targets), both (seq_len,) int64 ids: bytes from ``i * seq_len`` on, and the same one byte
    later, since each byte's target is the next one."""

    def __init__(self, spec: DataSpec) -> None:
        """Raises ConfigError when the corpus is shorter than one sample."""
        self._seq_len = spec.seq_len
        self._bytes = corpus(spec, spec.seq_len + 1)
        self.version = version_of(self._bytes)

    def __len__(self) -> int:
        return (self._bytes.size - 1) // self._seq_len

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = i * self._seq_len
        tokens = torch.from_numpy(self._bytes[start : start + self._seq_len + 1].astype(np.int64))
        return tokens[:-1], tokens[1:]


class BytePairs(Dataset[tuple[tuple[torch.Tensor, torch.Tensor], int]]):
    """Sample i is ((first, second), i): two passages of seq_len bytes as int64 ids, the second one right behind the
    first."""

    def __init__(self, spec: DataSpec) -> None:
        """Raises ConfigError when the corpus is shorter than one pair."""
        self._seq_len = spec.seq_len
        self._bytes = corpus(spec, 2 * spec.seq_len)
        self.version = version_of(self._bytes)

    def __len__(self) -> int:
        return self._bytes.size // (2 * self._seq_len)

    def __getitem__(self, i: int) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
        start = i * 2 * self._seq_len
        both = torch.from_numpy(self._bytes[start : start + 2 * self._seq_len].astype(np.int64))
        return (both[: self._seq_len], both[self._seq_len :]), i
