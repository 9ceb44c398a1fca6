"""Pairs of a chosen and a rejected answer, with the log-probabilities that the start weights give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from clustertrain.errors import CheckpointError, ConfigError
from clustertrain.train.data import validation_split
from clustertrain.train.data.packing import CutDocuments, IntArray
from clustertrain.train.data.token_shards import TokenSource

ANSWERS = 2  # per pair: chosen, then rejected


class PreferencePairs:
    """Samples (inputs, (targets, reference)): inputs and targets int64 (2, seq_len), reference fp32 (2,).

    Row 0 is the chosen answer with its prompt, row 1 the rejected one. Targets other than those of the answers are
    ignored. ``reference`` is 0 until :meth:`set_reference`.
    """

    def __init__(
        self,
        corpus: TokenSource,
        pairs: IntArray,
        lengths: IntArray,
        seq_len: int,
        ignore_index: int,
        cut: CutDocuments,
        version: str,
    ) -> None:
        """Select pairs of ``corpus``.

        Args:
            pairs: first token of the chosen and the rejected sequence, (pairs, 2).
            lengths: their tokens, (pairs, 2), at most ``seq_len`` + 1.
            cut: what became of longer sequences.
        """
        self.corpus = corpus
        self.cut = cut
        self.name, self.version = corpus.name, version
        self._starts, self._lengths = pairs, lengths
        self._seq_len = seq_len
        self._ignore_index = ignore_index
        self.reference = torch.zeros(len(pairs), ANSWERS)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        inputs = torch.zeros(ANSWERS, self._seq_len, dtype=torch.int64)
        targets = torch.full((ANSWERS, self._seq_len), self._ignore_index)
        for row in range(ANSWERS):
            start, length = int(self._starts[i, row]), int(self._lengths[i, row]) - 1
            tokens, answers = self.corpus.read(start, length + 1), self.corpus.read_answers(start + 1, length)
            inputs[row, :length] = tokens[:-1]
            targets[row, :length] = torch.where(answers, tokens[1:], self._ignore_index)
        return inputs, (targets, self.reference[i])

    def where(self, i: int) -> str:
        """Return the file and row of pair ``i``."""
        return self.corpus.where(int(self._starts[i, 0])).removesuffix(": chosen")

    @property
    def padding(self) -> float:
        """Fraction of positions without a token."""
        return 1 - float((self._lengths - 1).sum()) / (self._lengths.size * self._seq_len)

    def set_reference(self, reference: torch.Tensor) -> None:
        """Set the log-probabilities of all answers under the start weights, (pairs, 2)."""
        self.reference.copy_(reference)


class ReferenceLogProbs:
    """The references of the training and the validation pairs as part of a run's checkpoints."""

    def __init__(self, datasets: Sequence[PreferencePairs]) -> None:
        self.datasets = datasets

    def state_dict(self) -> dict[str, Any]:
        return {"references": [dataset.reference for dataset in self.datasets]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the references of the datasets.

        Raises:
            CheckpointError: they are those of other datasets.
        """
        references = state["references"]
        if [len(r) for r in references] != [len(dataset) for dataset in self.datasets]:
            raise CheckpointError(
                f"the checkpoint has reference log-probabilities of {' and '.join(str(len(r)) for r in references)} "
                f"pairs, and the data has {' and '.join(str(len(d)) for d in self.datasets)}",
                fix="train on the same data, or start a new run",
            )
        for dataset, reference in zip(self.datasets, references, strict=True):
            dataset.set_reference(reference)


def build_preference_datasets(
    corpus: TokenSource,
    validation_corpus: TokenSource | None,
    *,
    seq_len: int,
    validation: float,
    ignore_index: int,
) -> tuple[PreferencePairs, PreferencePairs | None]:
    """Build the training and the validation dataset (or None) of corpora whose documents alternate: chosen, rejected.

    Raises:
        ConfigError: there are too few pairs for ``validation``, or no answer of a pair starts within ``seq_len``.
    """

    def build(source: TokenSource, selected: IntArray | None = None) -> PreferencePairs:
        starts, lengths = (array.reshape(-1, ANSWERS) for array in source.documents())
        if selected is not None:
            starts, lengths = starts[selected], lengths[selected]
        return _build_pairs(source, starts, lengths, seq_len, ignore_index, validation)

    if not validation:
        return build(corpus), build(validation_corpus) if validation_corpus is not None else None
    count = len(corpus.documents()[0]) // ANSWERS
    held_out = round(count * validation)
    if not 0 < held_out < count:
        raise ConfigError(
            f"data.validation = {validation:g} of the {count} pairs of {corpus.name} leaves {held_out} for validation "
            f"and {count - held_out} for training",
            fix="add pairs, change the fraction, or set data.validation_path",
        )
    is_validation = np.zeros(count, dtype=bool)
    for first, end in zip(*validation_split.validation_spans(count, held_out), strict=True):
        is_validation[first:end] = True
    return build(corpus, np.flatnonzero(~is_validation)), build(corpus, np.flatnonzero(is_validation))


def _build_pairs(
    corpus: TokenSource, starts: IntArray, lengths: IntArray, seq_len: int, ignore_index: int, validation: float
) -> PreferencePairs:
    is_long = lengths > seq_len + 1
    kept = np.ones(len(starts), dtype=bool)
    for i, row in np.argwhere(is_long):
        kept[i] &= bool(corpus.read_answers(int(starts[i, row]) + 1, seq_len).any())
    if not kept.any():
        raise ConfigError(
            f"{corpus.name}: no pair has both answers start within data.seq_len = {seq_len} tokens",
            fix="raise data.seq_len",
        )
    cut = CutDocuments(int((is_long.any(1) & kept).sum()), int((~kept).sum()))
    version = f"{corpus.version}, pairs of {seq_len}" + (f", validation {validation:g}" if validation else "")
    return PreferencePairs(
        corpus, starts[kept], np.minimum(lengths[kept], seq_len + 1), seq_len, ignore_index, cut, version
    )
