"""Split of a dataset into training and validation samples, which depends only on the data and the fraction, not the
seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from clustertrain.errors import ConfigError
from clustertrain.train.data.permutation import Permutation
from clustertrain.train.data.sample_checks import describe_sample

MAX_SPANS = 16  # spans of consecutive validation samples in a text, evenly spaced
MAX_STORED_PERMUTATION = 4_000_000  # samples, 32 MB; a larger permutation is computed per sample
_SEED = 0  # fixed, so that the split is the same for every seed of a run

IndexArray = np.ndarray[Any, np.dtype[np.int64]]


class DatasetSplit:
    """A subset of the dataset ``unsplit`` in a fixed order, with its name and slices."""

    def __init__(self, dataset: Any, count: int, row: Callable[[int], int], version: str) -> None:
        """Select ``count`` samples; sample ``i`` is sample ``row(i)`` of ``dataset``."""
        self.unsplit = dataset
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
        return self.unsplit[self.row(i)]

    def slice_of(self, i: int) -> int:
        """Return the slice number of sample ``i``; raise AttributeError for a dataset without slices."""
        index: int = self.unsplit.slice_of(self.row(i))
        return index

    def where(self, i: int) -> str:
        """Return the sample's number and description in the unsplit dataset."""
        return f"of the unsplit data {describe_sample(self.unsplit, self.row(i))}"


def split(dataset: Any, fraction: float, name: str) -> tuple[DatasetSplit, DatasetSplit]:
    """Split off about ``fraction`` of the samples; return (training, validation).

    Text (an attribute ``is_stream``) is split in contiguous spans, so that validation text does not alternate with
    training text. Data with ``labels`` is split per class, keeping the proportions; other data by a permutation.

    Raises:
        ConfigError: there are too few samples, or ``labels`` does not have one per sample. The message contains
            ``name``.
    """
    size = len(dataset)
    validation_count = round(size * fraction)
    if not 0 < validation_count < size:
        raise ConfigError(
            f"data.validation = {fraction:g} of the {size} samples of {name} leaves {validation_count} for validation"
            f" and {size - validation_count} for training",
            fix="add data, change the fraction, or set data.validation_path",
        )
    labels = getattr(dataset, "labels", None)
    if getattr(dataset, "is_stream", False):
        counts, rows = _split_by_spans(size, validation_count)
    elif labels is not None:
        label_array = np.asarray(labels)
        if label_array.shape != (size,):
            raise ConfigError(
                f"{name} has {size} samples and labels of shape {list(label_array.shape)}: must be one per sample",
                fix="set the dataset's attribute labels to the class of each sample, or remove it",
            )
        counts, rows = _split_by_label(label_array, fraction)
    else:
        counts, rows = _split_by_permutation(size, validation_count)
    version = f"{getattr(dataset, 'version', None) or f'{size} samples'}, validation {fraction:g}"
    train, validation = (DatasetSplit(dataset, n, row, version) for n, row in zip(counts, rows, strict=True))
    return train, validation


def validation_spans(size: int, validation_count: int) -> tuple[IndexArray, IndexArray]:
    """Return (starts, ends) of at most :data:`MAX_SPANS` spans, ``validation_count`` samples in all.

    The dataset of ``size`` samples is divided into equal parts, and each span lies in the middle of one.
    """
    count = min(MAX_SPANS, validation_count)
    fractions = np.arange(count + 1, dtype=np.int64)
    size_bounds, count_bounds = fractions * size // count, fractions * validation_count // count
    lengths = np.diff(count_bounds)
    starts = size_bounds[:-1] + (np.diff(size_bounds) - lengths) // 2
    return starts, starts + lengths


IndexMap = Callable[[int], int]


@dataclass(frozen=True)
class _OutsideSpans:
    """Index map of the samples outside the spans."""

    outside_counts: IndexArray
    """Samples outside the spans before each span."""
    inside_counts: IndexArray
    """Samples inside the spans before each span."""

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
    """Index map that uses constant memory for any size, at half a millisecond per sample."""

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
    """Move at least one sample of each class to validation; a class with one sample stays in training."""
    is_validation = np.zeros(len(labels), dtype=bool)
    for class_index, label in enumerate(np.unique(labels)):
        rows = np.flatnonzero(labels == label)
        count = min(max(1, round(len(rows) * fraction)), len(rows) - 1)
        # A class that is not an integer (such as a string) is seeded by its index among the classes.
        key = int(label) if np.issubdtype(labels.dtype, np.integer) else class_index
        order = Permutation(len(rows), _SEED, key)(np.arange(len(rows), dtype=np.uint64))
        is_validation[rows[order[:count].astype(np.int64)]] = True
    validation_rows, train_rows = np.flatnonzero(is_validation), np.flatnonzero(~is_validation)
    return (len(train_rows), len(validation_rows)), (_ExplicitIndices(train_rows), _ExplicitIndices(validation_rows))


def _split_by_permutation(size: int, validation_count: int) -> tuple[tuple[int, int], tuple[IndexMap, IndexMap]]:
    order = Permutation(size, _SEED, 0)
    if size > MAX_STORED_PERMUTATION:
        return (size - validation_count, validation_count), (
            _PermutedIndices(order, validation_count),
            _PermutedIndices(order, 0),
        )
    rows = order(np.arange(size, dtype=np.uint64)).astype(np.int64)
    return (size - validation_count, validation_count), (
        _ExplicitIndices(rows[validation_count:]),
        _ExplicitIndices(rows[:validation_count]),
    )
