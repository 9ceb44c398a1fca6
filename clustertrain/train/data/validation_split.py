"""What is kept apart to validate on: the same samples in every run with the same data and share, whatever its seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from clustertrain.errors import ConfigError
from clustertrain.train.data.permutation import Permutation
from clustertrain.train.data.sample_checks import where

STRETCHES = 16  # of neighbouring samples that are kept apart of a text, evenly spread over it
LISTED = 4_000_000  # rows of a permutation that are kept, in 32 MB
_SEED = 0  # of the permutations, and never the run's

Rows = np.ndarray[Any, np.dtype[np.int64]]


class Part:
    """Some samples of the data set ``whole``, in an order of their own, with what it says of itself."""

    def __init__(self, whole: Any, count: int, row: Callable[[int], int], version: str) -> None:
        """``row(i)`` is the number in ``whole`` of sample ``i`` of ``count``."""
        self.whole = whole
        self._count = count
        self.row = row
        self.version = version
        self.name = getattr(whole, "name", "")
        self.slice_names: tuple[str, ...] = tuple(getattr(whole, "slice_names", ()))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self._count:
            raise IndexError(i)
        return self.whole[self.row(i)]

    def slice_of(self, i: int) -> int:
        """Raises AttributeError for a data set without slices."""
        found: int = self.whole.slice_of(self.row(i))
        return found

    def where(self, i: int) -> str:
        return f"of the whole data {where(self.whole, self.row(i))}"


def split(dataset: Any, share: float, name: str) -> tuple[Part, Part]:
    """``dataset`` without about ``share`` of its samples, and these.

    Text (an attribute ``is_stream``) is parted in stretches, so that what is kept apart does not lie between what is
    learned; images with ``labels`` class by class, so that each has the same share in both; anything else by a
    permutation of the numbers of its samples.

    Raises:
        ConfigError: there are too few samples, or not a label for each; ``name`` is the data's.
    """
    size = len(dataset)
    kept = round(size * share)
    if not 0 < kept < size:
        raise ConfigError(
            f"data.validation = {share:g} of the {size} samples of {name} leaves {kept} to validate on and "
            f"{size - kept} to learn from",
            fix="give more data, another share, or data.validation_path",
        )
    labels = getattr(dataset, "labels", None)
    if getattr(dataset, "is_stream", False):
        counts, rows = _by_stretches(size, kept)
    elif labels is not None:
        found = np.asarray(labels)
        if found.shape != (size,):
            raise ConfigError(
                f"{name} has {size} samples, and its labels are {list(found.shape)}: must be one for each sample",
                fix="give the data set's attribute labels the class of each sample, or none",
            )
        counts, rows = _by_label(found, share)
    else:
        counts, rows = _by_permutation(size, kept)
    version = f"{getattr(dataset, 'version', None) or f'{size} samples'}, validation {share:g}"
    train, validation = (Part(dataset, n, row, version) for n, row in zip(counts, rows, strict=True))
    return train, validation


def stretches(size: int, kept: int) -> tuple[Rows, Rows]:
    """(begins, ends) of the at most :data:`STRETCHES` runs of neighbours, ``kept`` in all, in the middle of equal parts
    of ``size``."""
    count = min(STRETCHES, kept)
    parts = np.arange(count + 1, dtype=np.int64)
    of_size, of_kept = parts * size // count, parts * kept // count
    long = np.diff(of_kept)
    begins = of_size[:-1] + (np.diff(of_size) - long) // 2
    return begins, begins + long


Rule = Callable[[int], int]


@dataclass(frozen=True)
class _Outside:
    """Sample i of what lies outside of the stretches: ``others`` of them lie before each, ``before`` inside."""

    others: Rows
    before: Rows

    def __call__(self, i: int) -> int:
        return i + int(self.before[int(np.searchsorted(self.others, i, side="right"))])


@dataclass(frozen=True)
class _Inside:
    begins: Rows
    before: Rows

    def __call__(self, i: int) -> int:
        at = int(np.searchsorted(self.before, i, side="right")) - 1
        return int(self.begins[at]) + i - int(self.before[at])


@dataclass(frozen=True)
class _Listed:
    rows: Rows

    def __call__(self, i: int) -> int:
        return int(self.rows[i])


@dataclass(frozen=True)
class _Permuted:
    """In constant memory, whatever the size, and half a millisecond a sample."""

    order: Permutation
    first: int

    def __call__(self, i: int) -> int:
        return int(self.order(np.array([self.first + i], dtype=np.uint64))[0])


def _by_stretches(size: int, kept: int) -> tuple[tuple[int, int], tuple[Rule, Rule]]:
    begins, ends = stretches(size, kept)
    before = np.concatenate(([0], np.cumsum(ends - begins)))
    return (size - kept, kept), (_Outside(begins - before[:-1], before), _Inside(begins, before))


def _by_label(labels: Rows, share: float) -> tuple[tuple[int, int], tuple[Rule, Rule]]:
    """Of each class at least one; a class of one is learned from."""
    apart = np.zeros(len(labels), dtype=bool)
    for nth, label in enumerate(np.unique(labels)):
        rows = np.flatnonzero(labels == label)
        count = min(max(1, round(len(rows) * share)), len(rows) - 1)
        # A class that is no number, as a word, has its place among them.
        key = int(label) if np.issubdtype(labels.dtype, np.integer) else nth
        order = Permutation(len(rows), _SEED, key)(np.arange(len(rows), dtype=np.uint64))
        apart[rows[order[:count].astype(np.int64)]] = True
    chosen, others = np.flatnonzero(apart), np.flatnonzero(~apart)
    return (len(others), len(chosen)), (_Listed(others), _Listed(chosen))


def _by_permutation(size: int, kept: int) -> tuple[tuple[int, int], tuple[Rule, Rule]]:
    order = Permutation(size, _SEED, 0)
    if size > LISTED:
        return (size - kept, kept), (_Permuted(order, kept), _Permuted(order, 0))
    rows = order(np.arange(size, dtype=np.uint64)).astype(np.int64)
    return (size - kept, kept), (_Listed(rows[kept:]), _Listed(rows[:kept]))
