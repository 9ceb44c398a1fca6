"""Conversations as tokens in memory, with a mark on those of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from clustertrain.config.chat.encode import ChatEncoder
from clustertrain.config.chat.rows import Conversation, list_chat_files, read_answers, read_conversations
from clustertrain.config.chat.shards import check_chat_shards, check_no_shards, has_shards
from clustertrain.config.chat.tokenizer import check_vocabulary
from clustertrain.config.parsing.token_shards import load_index
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.train.data.packing import IntArray
from clustertrain.train.data.preferences import build_preference_datasets
from clustertrain.train.data.token_shards import TokenCorpus, TokenSource, build_document_datasets


class ChatCorpus:
    """The conversations of a file or folder as one stream of tokens; ``len()`` counts tokens.

    Each rank reads and tokenizes all of them when it starts, so that a bad row is found before the first step.
    """

    has_answers = True

    def __init__(
        self,
        path: Path,
        encoder: ChatEncoder,
        key: str = "data.path",
        read: Callable[[Path], Iterable[Conversation]] = read_conversations,
    ) -> None:
        """Read and tokenize the conversations at ``path``; ``read`` yields those of a file.

        Raises:
            ConfigError: there is none, or a row is not usable; the message names the row.
            UnsuitableEnvironment: Parquet needs pyarrow, which is not installed.
        """
        self.name = f"{key} = {str(path)!r}"
        ids, answers, lengths = [], [], []
        self._rows: list[str] = []
        for file in list_chat_files(path, key):
            for encoded in encoder.encode(read(file)):
                ids.append(encoded.ids.astype(np.int32))
                answers.append(encoded.answers)
                lengths.append(len(encoded.ids))
                self._rows.append(encoded.where)
        if not lengths:
            raise ConfigError(f"{self.name}: no conversation", fix="write one JSON object per line")
        self._ids, self._answers = np.concatenate(ids), np.concatenate(answers)
        self._lengths: IntArray = np.array(lengths, dtype=np.int64)
        self._ends: IntArray = np.cumsum(self._lengths)
        self.version = self._compute_version()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def answer_share(self) -> float:
        """Share of the tokens that are answers."""
        return float(self._answers.mean())

    def read(self, start: int, count: int) -> torch.Tensor:
        """Return ``count`` tokens from ``start`` on as int64."""
        return torch.from_numpy(self._ids[start : start + count].astype(np.int64))

    def read_answers(self, start: int, count: int) -> torch.Tensor:
        """Return whether each of ``count`` tokens from ``start`` on is an answer."""
        return torch.from_numpy(self._answers[start : start + count])

    def documents(self) -> tuple[IntArray, IntArray]:
        """Return (first token, number of tokens) of each conversation."""
        return self._ends - self._lengths, self._lengths

    def where(self, token: int) -> str:
        """Return the file and row that a token is from."""
        return self._rows[int(np.searchsorted(self._ends, token, side="right"))]

    def _compute_version(self) -> str:
        """Return a checksum of all tokens and marks: another tokenizer or template means other data."""
        digest = xxhash.xxh3_64()
        for array in (self._ids, self._answers, self._lengths):
            digest.update(array.tobytes())
        return f"xxh3: {digest.hexdigest()}"


def build_chat_datasets(recipe: Recipe, vocab_size: int | None) -> tuple[Any, Any]:
    """Build the training dataset of ``data.kind = "chat"`` and the validation dataset (or None).

    They are ``PackedTokens``, or ``PreferencePairs`` for preference optimization.

    Raises:
        ConfigError: a file, a row, the tokenizer or the template is not usable, or has tokens beyond ``vocab_size``,
            the vocabulary of the model, if known.
        UnsuitableEnvironment: a package is not installed.
    """
    files = recipe.data_files
    encoder = ChatEncoder(files["tokenizer"], files.get("chat_template"))
    if vocab_size is not None:
        check_vocabulary(encoder.files, vocab_size)
    has_pairs = recipe.objective_kind == "dpo"
    train, validation = (
        _open_corpus(files[key], encoder, f"data.{key}", vocab_size, has_pairs=has_pairs) if key in files else None
        for key in ("path", "validation_path")
    )
    assert train is not None  # the kind needs a path
    if has_pairs:
        return build_preference_datasets(
            train,
            validation,
            seq_len=recipe.data.seq_len,
            validation=recipe.data.validation,
            ignore_index=recipe.objective.ignore_index,
        )
    return build_document_datasets(train, validation, recipe.data, recipe.objective.ignore_index)


def _open_corpus(path: Path, encoder: ChatEncoder, key: str, vocab_size: int | None, *, has_pairs: bool) -> TokenSource:
    """Return the conversations at ``path``: tokens in memory, or the shards that ``data tokenize`` made of them."""
    if has_pairs:
        check_no_shards(path, key)
        return ChatCorpus(path, encoder, key, read_answers)
    if not has_shards(path):
        return ChatCorpus(path, encoder, key)
    check_chat_shards(path, load_index(path), encoder.files, key)
    return TokenCorpus(path, vocab_size)
