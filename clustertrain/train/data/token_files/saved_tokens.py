"""Tokens in a data set that `datasets` saved, memory-mapped, as one stream of documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from clustertrain.config.parsing import saved_datasets
from clustertrain.config.parsing.saved_tokens import NOT_LEARNED, iter_token_rows
from clustertrain.errors import ConfigError
from clustertrain.train.data.packing import IntArray

_HASHED_BYTES = 64 * 1024  # bytes at each end of a file that are hashed for the version

Array = np.ndarray[Any, np.dtype[Any]]


class SavedTokens:
    """The rows of a saved data set as one stream of tokens, a document per row; ``len()`` counts tokens."""

    def __init__(self, path: Path, key: str = "data.path") -> None:
        """Map the files of the data set at ``path``.

        Raises:
            ConfigError: it is not readable or has no column of tokens.
            UnsuitableEnvironment: pyarrow is not installed.
        """
        self.name = f"{key} = {str(path)!r}"
        self._path, self._key = path, key
        self._map_files()
        if not len(self):
            raise ConfigError(f"{self.name}: no tokens", fix="choose a data set with rows")
        self.version = self._compute_version()

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getstate__(self) -> dict[str, Any]:
        # Pickling the maps would copy their content.
        return {**self.__dict__, "_ids": None, "_labels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map_files()

    def _map_files(self) -> None:
        self._ids: list[Array] = []
        self._labels: list[Array] = []
        lengths: list[Array] = []
        for rows in iter_token_rows(self._path, self._key):
            self._ids.append(rows.ids)
            lengths.append(np.diff(rows.ends, prepend=0))
            if rows.labels is not None:
                self._labels.append(rows.labels)
        self._offsets: IntArray = np.cumsum([0, *map(len, self._ids)], dtype=np.int64)
        self._lengths: IntArray = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
        self._ends: IntArray = np.cumsum(self._lengths)

    @property
    def has_answers(self) -> bool:
        """Whether labels say which tokens are learned."""
        return bool(self._labels)

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return ``count`` tokens from ``start`` on as int64."""
        return torch.from_numpy(self._read(self._ids, start, count))

    def read_answers(self, start: int, count: int) -> torch.Tensor:
        """Return whether each of ``count`` tokens from ``start`` on is learned; only if the data ``has_answers``."""
        return torch.from_numpy(self._read(self._labels, start, count) != NOT_LEARNED)

    def _read(self, parts: list[Array], start: int, count: int) -> IntArray:
        out: IntArray = np.empty(count, dtype=np.int64)
        filled, part = 0, int(np.searchsorted(self._offsets, start, side="right")) - 1
        while filled < count:
            offset = start + filled - int(self._offsets[part])
            chunk = parts[part][offset : offset + count - filled]
            out[filled : filled + len(chunk)] = chunk
            filled, part = filled + len(chunk), part + 1
        return out

    def documents(self) -> tuple[IntArray, IntArray]:
        """Return (first token, number of tokens) of each row."""
        return self._ends - self._lengths, self._lengths

    def where(self, token: int) -> str:
        """Return the row that a token is from."""
        return f"{self._path}, row {int(np.searchsorted(self._ends, token, side='right')) + 1}"

    def _compute_version(self) -> str:
        """Return a hash of each file's length, first and last bytes; a data set can be a terabyte."""
        digest = xxhash.xxh3_64()
        for path in saved_datasets.list_arrow_files(self._path, self._key):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(_HASHED_BYTES))
                file.seek(max(0, size - _HASHED_BYTES))
                digest.update(file.read(_HASHED_BYTES))
        return f"xxh3 of the ends: {digest.hexdigest()}"
