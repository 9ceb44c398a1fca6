"""The order of the samples: a pure function of (seed, epoch, sample index), in constant memory.

A Feistel network permutes the integers below a power of four; a result outside the dataset is permuted again until it
falls inside (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Every rank can thus
compute sample i of an epoch without a list of all samples, even right after a resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from clustertrain.train.core.seeds import derive_seed

_ROUNDS = 6
_U64 = np.uint64

Indices = np.ndarray[Any, np.dtype[np.uint64]]


def _mix(x: Indices) -> Indices:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


class Permutation:
    """Order of the ``size`` samples of one epoch."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = _U64(size)
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half, self._mask = _U64(half), _U64((1 << half) - 1)
        self._keys = [_U64(derive_seed(seed, "order", epoch, r)) for r in range(_ROUNDS)]

    def _feistel(self, x: Indices) -> Indices:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right

    def __call__(self, index: Indices) -> Indices:
        """Return the samples at positions ``index``, each below ``size``."""
        with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64
            x = self._feistel(index.astype(_U64))
            while (outside := x >= self._size).any():
                x[outside] = self._feistel(x[outside])
        return x


class ExcludedRanges:
    """Ranges of stream positions that no batch uses."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        """Start with ``ranges``, (first, end) pairs with ``end`` exclusive."""
        self.ranges: list[tuple[int, int]] = []
        for first, end in ranges:
            self.add(first, end)

    def add(self, first: int, end: int) -> None:
        """Add a range, merging it with ranges that it touches."""
        disjoint = [(a, b) for a, b in self.ranges if b < first or a > end]
        touching = [r for r in self.ranges if r not in disjoint]
        if end > first:
            merged = (min([first, *(a for a, _ in touching)]), max([end, *(b for _, b in touching)]))
            self.ranges = sorted([*disjoint, merged])

    def included_runs(self, position: int, count: int) -> list[tuple[int, int]]:
        """Return the next ``count`` included positions from ``position`` on, as (first, count) pairs."""
        runs: list[tuple[int, int]] = []
        for first, end in [*self.ranges, (None, None)]:
            if end is not None and end <= position:
                continue
            n = count if first is None else min(count, max(0, first - position))
            if n:
                runs.append((position, n))
                position, count = position + n, count - n
            if not count:
                break
            position = end if end is not None else position
        return runs


def samples_at(seed: int, size: int, start: int, count: int) -> list[int]:
    """Return the samples at positions ``start`` to ``start + count`` of the endless stream of epochs."""
    samples: list[int] = []
    while count > 0:
        epoch, offset = divmod(start, size)
        n = min(count, size - offset)
        samples += Permutation(size, seed, epoch)(np.arange(offset, offset + n, dtype=_U64)).tolist()
        start, count = start + n, count - n
    return samples
