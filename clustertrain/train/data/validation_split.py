"""What is kept apart to validate on: the same samples in every run with the same data and share, whatever its seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from clustertrain.errors import ConfigError
from clustertrain.train.data.permutation import Permutation
from clustertrain.train.data.sample_checks import describe_sample

MAX_SPANS = 16  # of neighbouring samples that are kept apart of a text, evenly spread over it
LISTED = 4_000_000  # rows of a permutation that are kept, in 32 MB
_SEED = 0  # of the permutations, and never the run's

IndexArray = np.ndarray[Any, np.dtype[np.int64]]


class DatasetSplit:
    """Some samples of the data set ``whole``, in an order of their own, with what it says of itself."""

    def __init__(self, dataset: Any, count: int, row: Callable[[int], int], version: str) -> None:
        """``row(i)`` is the number in ``dataset`` of sample ``i`` of ``count``."""
        self.whole = dataset
        self._count = count
        self.row = row
        self.version = version
        self.name = getattr(dataset, "name", "")
        self.slice_names: tuple[str, ...] = tuple(getattr(dataset, "slice_names", ()))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self._count:
            raise IndexError(i)
        return self.whole[self.row(i)]

    def slice_of(self, i: int) -> int:
        """Raises AttributeError for a data set without slices."""
        index: int = self.whole.slice_of(self.row(i))
        return index

    def where(self, i: int) -> str:
        return f"of the whole data {describe_sample(self.whole, self.row(i))}"


def split(dataset: Any, fraction: float, name: str) -> tuple[DatasetSplit, DatasetSplit]:
    """``dataset`` without about ``fraction`` of its samples, and these.

    Text (an attribute ``is_stream``) is parted in stretches, so that what is kept apart does not lie between what is
    learned; images with ``labels`` class by class, so that each has the same share in both; anything else by a
    permutation of the numbers of its samples.

    Raises:
        ConfigError: there are too few samples, or not a label for each; ``name`` is the data's.
    """
    size = len(dataset)
    validation_count = round(size * fraction)
    if not 0 < validation_count < size:
        raise ConfigError(
            f"data.validation = {fraction:g} of the {size} samples of {name} leaves {validation_count} to validate on"
            f" and {size - validation_count} to learn from",
            fix="give more data, another share, or data.validation_path",
        )
    labels = getattr(dataset, "labels", None)
    if getattr(dataset, "is_stream", False):
        counts, rows = _split_by_spans(size, validation_count)
    elif labels is not None:
        label_array = np.asarray(labels)
        if label_array.shape != (size,):
            raise ConfigError(
                f"{name} has {size} samples, and its labels are {list(label_array.shape)}: must be one for each sample",
                fix="give the data set's attribute labels the class of each sample, or none",
            )
        counts, rows = _split_by_label(label_array, fraction)
    else:
        counts, rows = _split_by_permutation(size, validation_count)
    version = f"{getattr(dataset, 'version', None) or f'{size} samples'}, validation {fraction:g}"
    train, validation = (DatasetSplit(dataset, n, row, version) for n, row in zip(counts, rows, strict=True))
    return train, validation


def validation_spans(size: int, validation_count: int) -> tuple[IndexArray, IndexArray]:
    """(begins, ends) of the at most :data:`MAX_SPANS` runs of neighbours, ``validation_count`` in all, in the middle
    of equal parts of ``size``."""
    count = min(MAX_SPANS, validation_count)
    fractions = np.arange(count + 1, dtype=np.int64)
    size_bounds, count_bounds = fractions * size // count, fractions * validation_count // count
    lengths = np.diff(count_bounds)
    starts = size_bounds[:-1] + (np.diff(size_bounds) - lengths) // 2
    return starts, starts + lengths


IndexMap = Callable[[int], int]


@dataclass(frozen=True)
class _OutsideSpans:
    """Sample i of what lies outside of the stretches: ``outside_counts`` of them lie before each, ``inside_counts``
    inside."""

    outside_counts: IndexArray
    inside_counts: IndexArray

    def __call__(self, i: int) -> int:
        return i + int(self.inside_counts[int(np.searchsorted(self.outside_counts, i, side="right"))])


@dataclass(frozen=True)
class _InsideSpans:
    starts: IndexArray
    offsets: IndexArray

    def __call__(self, i: int) -> int:
        span = int(np.searchsorted(self.offsets, i, side="right")) - 1
        return int(self.starts[span]) + i - int(self.offsets[span])


@dataclass(frozen=True)
class _ExplicitIndices:
    rows: IndexArray

    def __call__(self, i: int) -> int:
        return int(self.rows[i])


@dataclass(frozen=True)
class _PermutedIndices:
    """In constant memory, whatever the size, and half a millisecond a sample."""

    order: Permutation
    first: int

    def __call__(self, i: int) -> int:
        return int(self.order(np.array([self.first + i], dtype=np.uint64))[0])


def _split_by_spans(size: int, validation_count: int) -> tuple[tuple[int, int], tuple[IndexMap, IndexMap]]:
    starts, ends = validation_spans(size, validation_count)
    offsets = np.concatenate(([0], np.cumsum(ends - starts)))
    return (size - validation_count, validation_count), (
        _OutsideSpans(starts - offsets[:-1], offsets),
        _InsideSpans(starts, offsets),
    )


def _split_by_label(labels: IndexArray, fraction: float) -> tuple[tuple[int, int], tuple[IndexMap, IndexMap]]:
    """Of each class at least one; a class of one is learned from."""
    is_validation = np.zeros(len(labels), dtype=bool)
    for nth, label in enumerate(np.unique(labels)):
        rows = np.flatnonzero(labels == label)
        count = min(max(1, round(len(rows) * fraction)), len(rows) - 1)
        # A class that is no number, as a word, has its place among them.
        key = int(label) if np.issubdtype(labels.dtype, np.integer) else nth
        order = Permutation(len(rows), _SEED, key)(np.arange(len(rows), dtype=np.uint64))
        is_validation[rows[order[:count].astype(np.int64)]] = True
    validation_rows, train_rows = np.flatnonzero(is_validation), np.flatnonzero(~is_validation)
    return (len(train_rows), len(validation_rows)), (_ExplicitIndices(train_rows), _ExplicitIndices(validation_rows))


def _split_by_permutation(size: int, validation_count: int) -> tuple[tuple[int, int], tuple[IndexMap, IndexMap]]:
    order = Permutation(size, _SEED, 0)
    if size > LISTED:
        return (size - validation_count, validation_count), (
            _PermutedIndices(order, validation_count),
            _PermutedIndices(order, 0),
        )
    rows = order(np.arange(size, dtype=np.uint64)).astype(np.int64)
    return (size - validation_count, validation_count), (
        _ExplicitIndices(rows[validation_count:]),
        _ExplicitIndices(rows[:validation_count]),
    )
