"""Tokens that were made before, in shards that are mapped into memory: nothing is copied, and all processes of a node
share what the kernel has read. The format is in :mod:`clustertrain.config.token_shards`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from clustertrain.config import token_shards as format_
from clustertrain.config.data import DataSpec
from clustertrain.errors import ConfigError
from clustertrain.train.data import validation_split
from clustertrain.train.data.packing import Numbers, Packing, pack

_ENDS = 64 * 1024  # bytes at both ends of a shard that the version looks at

Tokens = np.ndarray[Any, np.dtype[Any]]


class Corpus:
    """The shards of a folder as one stream of tokens. ``len()`` is the number of tokens."""

    def __init__(self, folder: Path, vocab_size: int | None = None) -> None:
        """Raises ConfigError for what is no folder of shards, and for tokens that are known to be too large."""
        self.name = f"data.path = {str(folder)!r}"
        self._folder = folder
        self._index = format_.read_index(folder)
        if vocab_size is not None:
            format_.check_vocabulary(folder, self._index, vocab_size)
        self._maps: list[Tokens] = [self._map(shard) for shard in self._index.shards]
        self._begins: Numbers = np.concatenate(([0], np.cumsum([len(m) for m in self._maps]))).astype(np.int64)
        self.version = self._version()

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getstate__(self) -> dict[str, Any]:
        # A map would be pickled as the array that it shows.
        return {**self.__dict__, "_maps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._maps = [self._map(shard) for shard in self._index.shards]

    def read(self, begin: int, count: int) -> torch.Tensor:
        """``count`` tokens from ``begin`` on, int64; they may lie in several shards."""
        out = np.empty(count, dtype=np.int64)
        at, shard = 0, int(np.searchsorted(self._begins, begin, side="right")) - 1
        while at < count:
            inside = begin + at - int(self._begins[shard])
            part = self._maps[shard][inside : inside + count - at]
            out[at : at + len(part)] = part
            at, shard = at + len(part), shard + 1
        return torch.from_numpy(out)

    def documents(self) -> tuple[Numbers, Numbers]:
        """(first token, number of tokens) of each document."""
        begins, lengths = [], []
        for shard, of_shard, start in zip(self._index.shards, self._maps, self._begins, strict=False):
            ends = self._ends(shard, len(of_shard))
            first = np.concatenate(([0], ends[:-1])).astype(np.int64)
            begins.append(first + start)
            lengths.append(ends - first)
        return np.concatenate(begins), np.concatenate(lengths)

    def where(self, token: int) -> str:
        shard = int(np.searchsorted(self._begins, token, side="right")) - 1
        return f"{self._index.shards[shard].file}, from token {token - int(self._begins[shard])} on"

    def _map(self, shard: format_.Shard) -> Tokens:
        path = self._folder / shard.file
        try:
            if path.suffix == ".npy":
                found: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            else:
                size = path.stat().st_size
                # mmap refuses an empty file.
                found = np.memmap(path, dtype=np.dtype(self._index.dtype), mode="r") if size else np.zeros(0, np.uint16)
        except (OSError, ValueError) as e:
            raise ConfigError(f"{path}: not a shard of tokens: {e}", fix="docs/data.md has the format") from e
        if found.ndim != 1 or found.dtype.name not in format_.BYTES:
            raise ConfigError(
                f"{path}: {found.dtype} of shape {found.shape}",
                fix=f"store tokens in one dimension, as {' or '.join(format_.BYTES)}",
            )
        if shard.tokens is not None and shard.tokens != len(found):
            raise ConfigError(
                f"{path}: {len(found)} tokens, and {format_.INDEX} says {shard.tokens}",
                fix="the file was cut off or replaced: copy it again",
            )
        return found

    def _ends(self, shard: format_.Shard, tokens: int) -> Numbers:
        if not isinstance(shard.ends, str):
            ends = np.array(shard.ends, dtype=np.int64)
        elif shard.ends:
            path = self._folder / shard.ends
            try:
                ends = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as e:
                raise ConfigError(f"{path}: not the ends of documents: {e}", fix="docs/data.md has the format") from e
        else:
            ends = np.array([tokens], dtype=np.int64)
        whole = ends.ndim == 1 and ends.dtype.kind in "iu" and len(ends) > 0
        if not whole or int(ends[-1]) != tokens or ends[0] < 0 or bool((np.diff(ends) < 0).any()):
            raise ConfigError(
                f"{self._folder / shard.file}: its documents do not end one after the other up to its {tokens} tokens",
                fix="list where each document ends, the last one with the shard",
            )
        return ends

    def _version(self) -> str:
        """Of the index, and of each shard its length, its first and its last bytes: a corpus may have a terabyte."""
        digest = xxhash.xxh3_64()
        for shard, tokens in zip(self._index.shards, self._maps, strict=True):
            count = _ENDS // tokens.itemsize
            digest.update(f"{shard.file} {len(tokens)} {tokens.dtype}".encode())
            digest.update(tokens[:count].tobytes())
            digest.update(tokens[-count:].tobytes())
        return f"xxh3 of the ends: {digest.hexdigest()}"


class Windows:
    """Sample i is (inputs, targets), both (seq_len,) int64: tokens from ``i * seq_len`` on, and the same one token
    later. Documents follow each other without a break."""

    is_stream = True

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        """Raises ConfigError for fewer tokens than one sample has."""
        if len(corpus) <= seq_len:
            raise ConfigError(
                f"{corpus.name}: {len(corpus)} tokens are less than one sample of data.seq_len = {seq_len} and the "
                "token after it",
                fix="lower data.seq_len or give more text",
            )
        self.corpus = corpus
        self.name, self.version = corpus.name, corpus.version
        self._seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.corpus) - 1) // self._seq_len

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.corpus.read(i * self._seq_len, self._seq_len + 1)
        return tokens[:-1], tokens[1:]

    def where(self, i: int) -> str:
        return self.corpus.where(i * self._seq_len)


class Packed:
    """Sample i is (inputs, targets), both (seq_len,) int64: whole documents one after the other, each token's target
    the next one of its document. What is left is filled with token 0, whose target counts nothing.

    A document's tokens also see those of the documents before it in the sample: attention is not parted.
    """

    def __init__(self, corpus: Corpus, packing: Packing, ignore_index: int, version: str) -> None:
        self.corpus = corpus
        self.packing = packing
        self.name, self.version = corpus.name, version
        self._ignore_index = ignore_index

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self.packing
        inputs = torch.zeros(plan.size, dtype=torch.int64)
        targets = torch.full((plan.size,), self._ignore_index)
        at = 0
        for piece in range(int(plan.first[i]), int(plan.first[i + 1])):
            length = int(plan.lengths[piece])
            tokens = self.corpus.read(int(plan.begins[piece]), length + 1)
            inputs[at : at + length], targets[at : at + length] = tokens[:-1], tokens[1:]
            at += length
        return inputs, targets

    def where(self, i: int) -> str:
        return self.corpus.where(int(self.packing.begins[self.packing.first[i]]))


def tokens(spec: DataSpec, vocab_size: int | None, ignore_index: int) -> tuple[Any, Any]:
    """The data set of ``spec``, and what is kept apart of it or lies elsewhere to validate on (or None).

    Args:
        vocab_size: of the model, where it is known.
        ignore_index: the target that counts nothing.

    Raises:
        ConfigError: no shards, too few tokens, or tokens that the model does not know.
    """
    corpus = Corpus(Path(spec.path).expanduser(), vocab_size)
    other = Corpus(Path(spec.validation_path).expanduser(), vocab_size) if spec.validation_path else None
    if not spec.pack:
        whole = Windows(corpus, spec.seq_len)
        if spec.validation:
            return validation_split.split(whole, spec.validation, corpus.name)
        return whole, Windows(other, spec.seq_len) if other else None
    begins, lengths = corpus.documents()
    if not spec.validation:
        train = _packed(corpus, begins, lengths, spec, ignore_index)
        return train, _packed(other, *other.documents(), spec, ignore_index) if other else None
    # Documents and not samples are kept apart, so that no document is in both.
    kept = round(len(begins) * spec.validation)
    if not 0 < kept < len(begins):
        raise ConfigError(
            f"data.validation = {spec.validation:g} of the {len(begins)} documents of {corpus.name} leaves {kept} to "
            f"validate on and {len(begins) - kept} to learn from",
            fix="give more documents, another share, or data.validation_path",
        )
    apart = np.zeros(len(begins), dtype=bool)
    for first, end in zip(*validation_split.stretches(len(begins), kept), strict=True):
        apart[first:end] = True
    train, validation = (_packed(corpus, begins[m], lengths[m], spec, ignore_index) for m in (~apart, apart))
    return train, validation


def _packed(corpus: Corpus, begins: Numbers, lengths: Numbers, spec: DataSpec, ignore_index: int) -> Packed:
    version = f"{corpus.version}, packed by {spec.seq_len}" + (
        f", validation {spec.validation:g}" if spec.validation else ""
    )
    made = Packed(corpus, pack(begins, lengths, spec.seq_len), ignore_index, version)
    if not len(made):
        raise ConfigError(f"{corpus.name}: no document of two tokens or more", fix="give more text")
    return made
