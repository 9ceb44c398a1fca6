"""Assignment of documents to packed samples.

It depends only on the document lengths, so it is the same on every rank and in every attempt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

PACKING_WINDOW = 4096  # chunks packed together: enough to fill gaps, few enough to keep reads close together

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Packing:
    """Chunks of documents assigned to samples: sample i holds chunks ``sample_offsets[i]`` to ``sample_offsets[i +
    1]``."""

    size: int
    """Predictions per sample."""
    starts: IntArray
    """First token of each chunk."""
    lengths: IntArray
    """Predictions of each chunk, one less than its tokens."""
    sample_offsets: IntArray

    def __len__(self) -> int:
        return len(self.sample_offsets) - 1

    @property
    def has_several(self) -> bool:
        """Whether a sample may hold several chunks."""
        return len(self.lengths) > len(self)

    @property
    def padding(self) -> float:
        """Fraction of positions without a prediction."""
        return 1 - float(self.lengths.sum()) / (len(self) * self.size) if len(self) else 0.0


def pack(starts: IntArray, lengths: IntArray, size: int) -> Packing:
    """Pack documents into samples of ``size`` predictions.

    A document of n tokens has n - 1 predictions. One with more than ``size`` is split into chunks, each starting with
    the last token of the previous one. Within each window of :data:`PACKING_WINDOW` chunks, the longest is placed
    first, and each goes into the sample where it leaves the least room ("best fit decreasing"; Johnson, "Near-optimal
    bin packing algorithms", 1973).

    Args:
        starts: first token of each document, (documents,).
        lengths: tokens of each document, (documents,).
    """
    chunk_starts, predictions = _split_documents(starts, lengths, size)
    window_orders: list[IntArray] = []
    counts: list[int] = []
    for start in range(0, len(chunk_starts), PACKING_WINDOW):
        for bin_ in _best_fit_decreasing(predictions[start : start + PACKING_WINDOW], size):
            window_orders.append(start + np.array(sorted(bin_), dtype=np.int64))
            counts.append(len(bin_))
    indices = np.concatenate(window_orders) if window_orders else np.zeros(0, dtype=np.int64)
    sample_offsets = np.concatenate(([0], np.cumsum(np.array(counts, dtype=np.int64)))).astype(np.int64)
    return Packing(size, chunk_starts[indices], predictions[indices], sample_offsets)


@dataclass(frozen=True)
class CutDocuments:
    """What became of documents with more tokens than a sample holds, if they may not be split."""

    cut: int
    """Documents of which the end is missing."""
    left_out: int
    """Documents that are missing, because no token that is learned is left of them."""


def place_singly(starts: IntArray, lengths: IntArray, size: int) -> Packing:
    """Put each document of two to ``size`` + 1 tokens into a sample of its own; arguments as for :func:`pack`."""
    kept = lengths > 1
    return Packing(size, starts[kept], lengths[kept] - 1, np.arange(int(kept.sum()) + 1, dtype=np.int64))


def cut_documents(
    starts: IntArray, lengths: IntArray, size: int, read_answers: Callable[[int, int], torch.Tensor]
) -> tuple[IntArray, IntArray, CutDocuments]:
    """Cut documents at their end to ``size`` predictions; leave those out that then have no answer.

    Args:
        read_answers: returns whether each token is an answer, by (first token, count).

    Returns:
        (starts, lengths, what was cut)
    """
    is_long = lengths > size + 1
    kept = np.ones(len(lengths), dtype=bool)
    for i in np.flatnonzero(is_long):
        kept[i] = bool(read_answers(int(starts[i]) + 1, size).any())
    cut = CutDocuments(int((is_long & kept).sum()), int((~kept).sum()))
    return starts[kept], np.minimum(lengths[kept], size + 1), cut


def _split_documents(starts: IntArray, lengths: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """Return (starts, predictions) of the chunks of all documents."""
    predictions = np.maximum(lengths - 1, 0)
    chunk_counts = -(-predictions // size)
    document = np.repeat(np.arange(len(lengths)), chunk_counts)
    chunk_index = np.arange(len(document)) - np.repeat(np.cumsum(chunk_counts) - chunk_counts, chunk_counts)
    return starts[document] + chunk_index * size, np.minimum(predictions[document] - chunk_index * size, size)


def _best_fit_decreasing(lengths: IntArray, size: int) -> list[list[int]]:
    """Return the chunks of each sample, samples ordered by their first chunk."""
    longest_first = np.argsort(-lengths, kind="stable").tolist()
    sizes = lengths.tolist()
    free_space: list[tuple[int, int]] = []  # (remaining space, sample), sorted
    samples: list[list[int]] = []
    for chunk in longest_first:
        slot = bisect_left(free_space, (sizes[chunk], -1))
        if slot == len(free_space):
            remaining, sample = size, len(samples)
            samples.append([])
        else:
            remaining, sample = free_space.pop(slot)
        samples[sample].append(chunk)
        remaining -= sizes[chunk]
        if remaining:
            insort(free_space, (remaining, sample))
    return sorted(samples, key=min)
