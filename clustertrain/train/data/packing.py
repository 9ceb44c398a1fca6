"""Which documents share a sample: a plan that follows from their lengths alone, the same on every rank and in every
attempt."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np

WINDOW = 4096  # pieces that are packed together: enough to fill gaps, and what is read together lies near together

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Packing:
    """Sample i holds the pieces ``first[i]`` to ``first[i + 1]`` of ``begins`` (the token a piece begins with) and
    ``lengths`` (its predictions: one less than its tokens)."""

    size: int
    begins: Numbers
    lengths: Numbers
    first: Numbers

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def padding(self) -> float:
        """The share of all places that hold no prediction."""
        return 1 - float(self.lengths.sum()) / (len(self) * self.size) if len(self) else 0.0


def pack(begins: Numbers, lengths: Numbers, size: int) -> Packing:
    """Pack documents into samples of ``size`` predictions.

    A document of n tokens has n - 1 predictions; a longer one than fits is cut, each part beginning with the last token
    of the one before. In windows of :data:`WINDOW` parts the longest is placed first, each where it leaves the least
    room ("best fit decreasing"; Johnson, "Near-optimal bin packing algorithms", 1973).

    Args:
        begins: the first token of each document, (documents,).
        lengths: how many tokens it has, (documents,).
    """
    pieces, predictions = _cut(begins, lengths, size)
    order: list[Numbers] = []
    counts: list[int] = []
    for start in range(0, len(pieces), WINDOW):
        for bin_ in _fill(predictions[start : start + WINDOW], size):
            order.append(start + np.array(sorted(bin_), dtype=np.int64))
            counts.append(len(bin_))
    at = np.concatenate(order) if order else np.zeros(0, dtype=np.int64)
    first = np.concatenate(([0], np.cumsum(np.array(counts, dtype=np.int64)))).astype(np.int64)
    return Packing(size, pieces[at], predictions[at], first)


def _cut(begins: Numbers, lengths: Numbers, size: int) -> tuple[Numbers, Numbers]:
    """(begin, predictions) of the parts of documents."""
    predictions = np.maximum(lengths - 1, 0)
    parts = -(-predictions // size)
    document = np.repeat(np.arange(len(lengths)), parts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    return begins[document] + within * size, np.minimum(predictions[document] - within * size, size)


def _fill(lengths: Numbers, size: int) -> list[list[int]]:
    """The pieces of each sample; samples in the order of their first piece."""
    longest_first = np.argsort(-lengths, kind="stable").tolist()
    of_piece = lengths.tolist()
    room: list[tuple[int, int]] = []  # (what is left, sample), sorted
    samples: list[list[int]] = []
    for piece in longest_first:
        at = bisect_left(room, (of_piece[piece], -1))
        if at == len(room):
            left, sample = size, len(samples)
            samples.append([])
        else:
            left, sample = room.pop(at)
        samples[sample].append(piece)
        left -= of_piece[piece]
        if left:
            insort(room, (left, sample))
    return sorted(samples, key=min)
