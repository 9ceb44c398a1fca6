"""Pre-tokenized data in memory-mapped shards, which all processes of a node share without copies.

:mod:`clustertrain.config.parsing.token_shards` defines the format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import xxhash

from clustertrain.config.data import DataSpec
from clustertrain.config.parsing.foreign_shards import LOSS_SUFFIX, load_shards
from clustertrain.config.parsing.saved_datasets import is_saved_dataset
from clustertrain.config.parsing.token_shards import DTYPE_BYTES, INDEX_FILE, TokenShard, check_vocabulary
from clustertrain.documentation import page_url
from clustertrain.errors import ConfigError
from clustertrain.train.core.step_types import DOCUMENT_STARTS
from clustertrain.train.data import validation_split
from clustertrain.train.data.packing import CutDocuments, IntArray, Packing, cut_documents, pack, place_singly
from clustertrain.train.data.token_files.document_ends import read_document_ends
from clustertrain.train.data.token_files.saved_tokens import SavedTokens

_HASHED_BYTES = 64 * 1024  # bytes at each end of a shard that are hashed for the version

TokenArray = np.ndarray[Any, np.dtype[Any]]
Inputs: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"


class TokenCorpus:
    """The shards of a folder as one stream of tokens; ``len()`` counts tokens."""

    def __init__(self, folder: Path, vocab_size: int | None = None) -> None:
        """Map the shards of ``folder``.

        Raises:
            ConfigError: the folder does not hold shards, or its index lists tokens beyond ``vocab_size``.
        """
        self.name = f"data.path = {str(folder)!r}"
        self._folder, self._index = load_shards(folder)
        if vocab_size is not None:
            check_vocabulary(folder, self._index, vocab_size)
        self._map_files()
        self._shard_offsets: IntArray = np.concatenate(([0], np.cumsum([len(m) for m in self._maps]))).astype(np.int64)
        self.version = self._compute_version()

    def __len__(self) -> int:
        return int(self._shard_offsets[-1])

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a memory map would copy its content.
        return {**self.__dict__, "_maps": None, "_answer_maps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map_files()

    def _map_files(self) -> None:
        self._maps: list[TokenArray] = [self._mmap_shard(shard) for shard in self._index.shards]
        self._answer_maps: list[TokenArray] = [
            self._mmap_answers(shard, len(tokens))
            for shard, tokens in zip(self._index.shards, self._maps, strict=True)
            if shard.answers
        ]

    @property
    def has_answers(self) -> bool:
        """Whether the shards mark the tokens to learn."""
        return self._index.has_answers

    @property
    def tokenizer(self) -> str:
        """The tokenizer that the index names."""
        return self._index.tokenizer

    def read_answers(self, start: int, count: int) -> torch.Tensor:
        """Return whether each of ``count`` tokens from ``start`` on is marked; only if the corpus ``has_answers``."""
        return self._read(self._answer_maps, start, np.empty(count, dtype=np.bool_))

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return ``count`` tokens from ``start`` on as int64, possibly from several shards."""
        return self._read(self._maps, start, np.empty(count, dtype=np.int64))

    def _read(self, maps: list[TokenArray], start: int, out: TokenArray) -> torch.Tensor:
        """Fill ``out`` with the values of ``maps`` from token ``start`` on."""
        filled, shard, count = 0, int(np.searchsorted(self._shard_offsets, start, side="right")) - 1, len(out)
        while filled < count:
            offset = start + filled - int(self._shard_offsets[shard])
            chunk = maps[shard][offset : offset + count - filled]
            out[filled : filled + len(chunk)] = chunk
            filled, shard = filled + len(chunk), shard + 1
        return torch.from_numpy(out)

    def documents(self) -> tuple[IntArray, IntArray]:
        """Return (first token, number of tokens) of each document."""
        starts, lengths = [], []
        for shard, tokens, start in zip(self._index.shards, self._maps, self._shard_offsets, strict=False):
            ends = self._document_ends(shard, len(tokens))
            shard_starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
            starts.append(shard_starts + start)
            lengths.append(ends - shard_starts)
        return np.concatenate(starts), np.concatenate(lengths)

    def where(self, token: int) -> str:
        """Return the shard file and position of a token as text."""
        shard = int(np.searchsorted(self._shard_offsets, token, side="right")) - 1
        return f"{self._index.shards[shard].file}, from token {token - int(self._shard_offsets[shard])} on"

    def _mmap_shard(self, shard: TokenShard) -> TokenArray:
        path = self._folder / shard.file
        try:
            if path.suffix == ".npy":
                tokens: TokenArray = np.load(path, mmap_mode="r", allow_pickle=False)
            else:
                size = path.stat().st_size
                # mmap rejects an empty file.
                tokens = (
                    np.memmap(path, dtype=np.dtype(shard.dtype or self._index.dtype), mode="r")
                    if size
                    else np.zeros(0, np.uint16)
                )
        except (OSError, ValueError) as e:
            raise ConfigError(
                f"{path}: not a shard of tokens: {e}", fix=f"see {page_url('guides/data')} for the format"
            ) from e
        if tokens.ndim != 1 or tokens.dtype.name not in DTYPE_BYTES:
            raise ConfigError(
                f"{path}: {tokens.dtype} of shape {tokens.shape}",
                fix=f"store tokens in one dimension, as {' or '.join(DTYPE_BYTES)}",
            )
        if shard.tokens is not None and shard.tokens != len(tokens):
            raise ConfigError(
                f"{path}: {len(tokens)} tokens, but {INDEX_FILE} lists {shard.tokens}",
                fix="copy the file again; it was truncated or replaced",
            )
        return tokens

    def _mmap_answers(self, shard: TokenShard, tokens: int) -> TokenArray:
        path = self._folder / shard.answers
        try:
            if path.suffix == LOSS_SUFFIX:
                answers: TokenArray = np.memmap(path, dtype=np.uint8, mode="r") if tokens else np.zeros(0, np.uint8)
            else:
                answers = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as e:
            raise ConfigError(
                f"{path}: not an array of marks: {e}", fix=f"see {page_url('guides/data')} for the format"
            ) from e
        if answers.shape != (tokens,) or answers.dtype not in (np.bool_, np.uint8):
            raise ConfigError(
                f"{path}: {answers.dtype} of shape {answers.shape} for {tokens} tokens",
                fix="store one bool per token, or tokenize again",
            )
        return answers

    def _document_ends(self, shard: TokenShard, tokens: int) -> IntArray:
        if not isinstance(shard.document_ends, str):
            ends = np.array(shard.document_ends, dtype=np.int64)
        elif shard.document_ends:
            ends = read_document_ends(self._folder / shard.document_ends, shard.dtype)
        else:
            ends = np.array([tokens], dtype=np.int64)
        is_valid_array = ends.ndim == 1 and ends.dtype.kind in "iu" and len(ends) > 0
        if not is_valid_array or int(ends[-1]) != tokens or ends[0] < 0 or bool((np.diff(ends) < 0).any()):
            raise ConfigError(
                f"{self._folder / shard.file}: document ends must ascend up to the shard's {tokens} tokens",
                fix="list the end of each document in order; the last one is the shard's end",
            )
        return ends

    def _compute_version(self) -> str:
        """Return a hash of the index and each shard's length, first and last bytes; a corpus can be a terabyte."""
        digest = xxhash.xxh3_64()
        for shard, tokens in zip(self._index.shards, self._maps, strict=True):
            count = _HASHED_BYTES // tokens.itemsize
            digest.update(f"{shard.file} {len(tokens)} {tokens.dtype}".encode())
            digest.update(tokens[:count].tobytes())
            digest.update(tokens[-count:].tobytes())
        for answers in self._answer_maps:
            digest.update(answers[:_HASHED_BYTES].tobytes())
            digest.update(answers[-_HASHED_BYTES:].tobytes())
        return f"xxh3 of the ends: {digest.hexdigest()}"


class TokenWindows:
    """Samples (inputs, targets), both int64 (seq_len,), from concatenated documents.

    Inputs are the tokens from ``i * seq_len`` on; targets are the same tokens shifted by one.
    """

    is_stream = True

    def __init__(self, corpus: TokenSource, seq_len: int, ignore_index: int = -100) -> None:
        """Cut ``corpus`` into windows. Targets that it does not mark as answers, if it has marks, are ignored.

        Raises:
            ConfigError: the corpus is shorter than one sample.
        """
        if len(corpus) <= seq_len:
            raise ConfigError(
                f"{corpus.name}: {len(corpus)} tokens, and one sample needs data.seq_len = {seq_len} and the token "
                "after it",
                fix="lower data.seq_len or add text",
            )
        self.corpus = corpus
        self.name, self.version = corpus.name, corpus.version
        self._seq_len = seq_len
        self._ignore_index = ignore_index

    def __len__(self) -> int:
        return (len(self.corpus) - 1) // self._seq_len

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = i * self._seq_len
        tokens = self.corpus.read(start, self._seq_len + 1)
        if self.corpus.has_answers:
            answers = self.corpus.read_answers(start + 1, self._seq_len)
            return tokens[:-1], torch.where(answers, tokens[1:], self._ignore_index)
        return tokens[:-1], tokens[1:]

    def where(self, i: int) -> str:
        """Return the shard file and first token of sample ``i`` as text."""
        return self.corpus.where(i * self._seq_len)


class TokenSource(Protocol):
    """Documents as one stream of tokens, read by position; ``len()`` counts tokens."""

    name: str
    """Key and path, for messages."""
    version: str
    """A checksum of the content."""

    def __len__(self) -> int: ...
    def read(self, start: int, count: int, /) -> torch.Tensor: ...
    def documents(self) -> tuple[IntArray, IntArray]: ...
    def where(self, token: int, /) -> str: ...

    @property
    def has_answers(self) -> bool:
        """Whether some tokens are marked as answers, and only they are learned."""

    def read_answers(self, start: int, count: int, /) -> torch.Tensor:
        """Return whether each token is an answer; only if the source ``has_answers``."""


class PackedTokens:
    """Samples (inputs, targets), both int64 (seq_len,), of documents packed without splitting where possible.

    Each target is the next token of the same document, or ignored if it is not an answer in a corpus that marks these.
    Remaining positions are padded with token 0 and ignored targets.

    With ``gives_starts``, the inputs are ``{"tokens": ..., "document_starts": ...}``: ``document_starts`` (seq_len,)
    int64 is the position in the sample of the first token of each token's document. Each part of a document that was
    split counts as a document, and so does the padding.
    """

    def __init__(
        self,
        corpus: TokenSource,
        packing: Packing,
        ignore_index: int,
        version: str,
        cut: CutDocuments | None = None,
        *,
        gives_starts: bool = False,
    ) -> None:
        """``cut`` says what became of documents that are longer than a sample; None: they were split."""
        self.corpus = corpus
        self.packing = packing
        self.cut = cut
        self.name, self.version = corpus.name, version
        self._ignore_index = ignore_index
        self._gives_starts = gives_starts

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, i: int) -> tuple[Inputs, torch.Tensor]:
        packing = self.packing
        inputs = torch.zeros(packing.size, dtype=torch.int64)
        targets = torch.full((packing.size,), self._ignore_index)
        document_starts = torch.zeros(packing.size, dtype=torch.int64)
        offset = 0
        for chunk in range(int(packing.sample_offsets[i]), int(packing.sample_offsets[i + 1])):
            length = int(packing.lengths[chunk])
            tokens = self.corpus.read(int(packing.starts[chunk]), length + 1)
            inputs[offset : offset + length], targets[offset : offset + length] = tokens[:-1], tokens[1:]
            if self.corpus.has_answers:
                answers = self.corpus.read_answers(int(packing.starts[chunk]) + 1, length)
                targets[offset : offset + length][~answers] = self._ignore_index
            document_starts[offset : offset + length] = offset
            offset += length
        document_starts[offset:] = offset
        return {"tokens": inputs, DOCUMENT_STARTS: document_starts} if self._gives_starts else inputs, targets

    def where(self, i: int) -> str:
        """Return the shard file and first token of sample ``i`` as text."""
        return self.corpus.where(int(self.packing.starts[self.packing.sample_offsets[i]]))


def build_token_datasets(spec: DataSpec, vocab_size: int | None, ignore_index: int) -> tuple[Any, Any]:
    """Build the training dataset of ``spec`` and the validation dataset (or None).

    Args:
        vocab_size: vocabulary of the model, if known.
        ignore_index: target value without loss.

    Raises:
        ConfigError: there are no shards, too few tokens, or tokens outside the vocabulary.
    """
    corpus = _open_corpus(spec.path, "data.path", vocab_size)
    validation_corpus = (
        _open_corpus(spec.validation_path, "data.validation_path", vocab_size) if spec.validation_path else None
    )
    if spec.pack:
        return build_document_datasets(corpus, validation_corpus, spec, ignore_index)
    windows = TokenWindows(corpus, spec.seq_len, ignore_index)
    if spec.validation:
        return validation_split.split(windows, spec.validation, corpus.name)
    return windows, TokenWindows(validation_corpus, spec.seq_len, ignore_index) if validation_corpus else None


def _open_corpus(path: str, key: str, vocab_size: int | None) -> TokenSource:
    folder = Path(path).expanduser()
    return SavedTokens(folder, key) if is_saved_dataset(folder) else TokenCorpus(folder, vocab_size)


def build_document_datasets(
    corpus: TokenSource, validation_corpus: TokenSource | None, spec: DataSpec, ignore_index: int
) -> tuple[PackedTokens, PackedTokens | None]:
    """Build the training and validation datasets (or None) of documents; ``ignore_index`` means no loss.

    With ``data.kind = "chat"`` the corpora ``has_answers``, and documents are cut instead of split.

    Raises:
        ConfigError: there are too few documents for ``data.validation``, or none fits into a sample.
    """
    starts, lengths = corpus.documents()
    if not spec.validation:
        train = _build_packed(corpus, starts, lengths, spec, ignore_index)
        return train, (
            _build_packed(validation_corpus, *validation_corpus.documents(), spec, ignore_index)
            if validation_corpus
            else None
        )
    # Split documents rather than samples, so that no document is in both.
    validation_count = round(len(starts) * spec.validation)
    if not 0 < validation_count < len(starts):
        raise ConfigError(
            f"data.validation = {spec.validation:g} of the {len(starts)} documents of {corpus.name} leaves"
            f" {validation_count} for validation and {len(starts) - validation_count} for training",
            fix="add documents, change the fraction, or set data.validation_path",
        )
    is_validation = np.zeros(len(starts), dtype=bool)
    for first, end in zip(*validation_split.validation_spans(len(starts), validation_count), strict=True):
        is_validation[first:end] = True
    train, validation = (
        _build_packed(corpus, starts[mask], lengths[mask], spec, ignore_index)
        for mask in (~is_validation, is_validation)
    )
    return train, validation


def _build_packed(
    corpus: TokenSource, starts: IntArray, lengths: IntArray, spec: DataSpec, ignore_index: int
) -> PackedTokens:
    cut = None
    if spec.kind == "chat":  # a part of a conversation would lack what it answers to
        starts, lengths, cut = cut_documents(starts, lengths, spec.seq_len, corpus.read_answers)
        if not len(starts):
            raise ConfigError(
                f"{corpus.name}: in no conversation does an answer start within data.seq_len = {spec.seq_len} tokens",
                fix="raise data.seq_len",
            )
    packing = pack(starts, lengths, spec.seq_len) if spec.pack else place_singly(starts, lengths, spec.seq_len)
    version = f"{corpus.version}, {'packed by' if spec.pack else 'singly in'} {spec.seq_len}" + (
        f", validation {spec.validation:g}" if spec.validation else ""
    )
    packed = PackedTokens(
        corpus, packing, ignore_index, version, cut, gives_starts=spec.pack and spec.attention == "document"
    )
    if not len(packed):
        raise ConfigError(f"{corpus.name}: no document has two tokens or more", fix="add text")
    return packed
