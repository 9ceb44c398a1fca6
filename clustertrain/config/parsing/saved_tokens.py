"""Token columns of saved data sets: ``input_ids``, and ``labels``, which say what is learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clustertrain import extras
from clustertrain.config.parsing import saved_datasets
from clustertrain.errors import ConfigError

IDS, LABELS, MASK = "input_ids", "labels", "attention_mask"
NOT_LEARNED = -100  # in labels, as in transformers
_CHECKED_ROWS = 1024  # of the first rows, whose masks and labels are compared with their tokens

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TokenRows:
    """Some neighboring rows of a saved data set. The arrays are parts of the mapped file."""

    ids: Array
    """The tokens of all rows, one after the other."""
    ends: Array
    """End of each row in ``ids``, int64."""
    labels: Array | None
    """As ``ids``, or -100 where a token is not learned; None: all are learned."""


def iter_token_rows(path: Path, key: str = "data.path") -> Iterator[TokenRows]:
    """Yield all rows of the saved data set at ``path``, in batches.

    Raises:
        ConfigError: there is no column ``input_ids`` of lists of integers, ``labels`` do not match it, or the rows are
            padded.
        UnsuitableEnvironment: pyarrow is not installed.
    """
    names = saved_datasets.read_columns(path, key)
    if IDS not in names:
        raise saved_datasets.missing_columns(path, names, (IDS,), key)
    is_first = True
    for batch in saved_datasets.iter_batches(path, (IDS, LABELS, MASK), key):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        ids, ends = _read_lists(columns[IDS], f"{path}: {IDS}")
        labels = None
        if LABELS in columns:
            labels, label_ends = _read_lists(columns[LABELS], f"{path}: {LABELS}")
            if not np.array_equal(ends, label_ends):
                raise ConfigError(
                    f"{path}: {LABELS} and {IDS} of a row have different lengths",
                    fix=f"write one label per token, or remove the column {LABELS}",
                )
        if is_first:
            _check_first_rows(path, ids, ends, labels, columns.get(MASK))
            is_first = False
        yield TokenRows(ids, ends, labels)


def _read_lists(column: Any, name: str) -> tuple[Array, Array]:
    """Return the values of a column of lists, and the end of each list in them."""
    extras.require("pyarrow", name)
    import pyarrow
    from pyarrow import types

    if types.is_fixed_size_list(column.type):
        width, first = column.type.list_size, column.offset
        values, bounds = column.values, (first + np.arange(len(column) + 1, dtype=np.int64)) * width
    elif types.is_list(column.type) or types.is_large_list(column.type):
        values, bounds = column.values, column.offsets.to_numpy().astype(np.int64)
    else:
        raise ConfigError(f"{name}: {column.type}, not lists of integers", fix="tokenize the text of each row")
    if isinstance(values, pyarrow.ExtensionArray) or not types.is_integer(values.type):
        raise ConfigError(f"{name}: {column.type}, not lists of integers", fix="tokenize the text of each row")
    values = values.slice(int(bounds[0]), int(bounds[-1] - bounds[0]))
    if column.null_count or values.null_count:
        raise ConfigError(f"{name}: a row without a value", fix="remove such rows")
    return values.to_numpy(), bounds[1:] - bounds[0]


def _check_first_rows(path: Path, ids: Array, ends: Array, labels: Array | None, mask: Any) -> None:
    end = int(ends[min(len(ends), _CHECKED_ROWS) - 1]) if len(ends) else 0
    if mask is not None and not _read_lists(mask, f"{path}: {MASK}")[0][:end].all():
        raise ConfigError(
            f"{path}: rows are padded: {MASK} has zeros", fix="tokenize without padding; data.pack fills the samples"
        )
    if labels is not None:
        learned = labels[:end] != NOT_LEARNED
        if not np.array_equal(labels[:end][learned], ids[:end][learned]):
            raise ConfigError(
                f"{path}: {LABELS} differ from {IDS}",
                fix=f"write {LABELS} as {IDS}, with {NOT_LEARNED} where nothing is learned; they are shifted in "
                "training",
            )
