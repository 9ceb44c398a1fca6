"""Reads one micro-batch: samples in their order, each with generators of its own, put together and looked at."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from clustertrain.errors import ConfigError
from clustertrain.train.core.seeds import derive
from clustertrain.train.data.sample_checks import Check, where

Key = tuple[int, int]  # (sample, its position in the run)


class MapStyle(Protocol):
    """Any map-style data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Any: ...


@dataclass(frozen=True)
class Refused:
    """What a worker found wrong: an exception of its own would arrive with a traceback for a message."""

    message: str
    fix: str | None


class Reader(Dataset[Any]):
    """Micro-batches by the keys of their samples.

    Python's, numpy's and torch's generators are seeded by the position before each sample is read, so that a random
    augmentation depends neither on the ranks, nor on the workers, nor on where the run was interrupted.
    """

    def __init__(self, dataset: MapStyle, seed: int, check: Check | None = None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._check = check

    def read(self, keys: Sequence[Key]) -> Any:
        """In the rank's own process, whose generators are those that the checkpoint holds: they stay as they are.

        Raises:
            ConfigError: a sample that cannot be trained on; names it.
        """
        with _generators_kept():
            return self._read(keys)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """In a worker; what torch's fetcher calls for a whole batch."""
        try:
            return self._read(keys)
        except ConfigError as e:
            return Refused(e.message, e.fix)

    def _read(self, keys: Sequence[Key]) -> Any:
        samples = [self._sample(*key) for key in keys]
        try:
            batch = default_collate(samples)
        except (RuntimeError, TypeError, KeyError) as e:
            raise self._unlike(keys, samples, e) from e
        if self._check is not None:
            self._check(batch, keys, self._dataset)
        return batch

    def _sample(self, sample: int, position: int) -> Any:
        seed = derive(self._seed, "sample", position)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            return self._dataset[sample]
        except Exception as e:
            e.add_note(f"while {where(self._dataset, sample)} was read")
            raise

    def _unlike(self, keys: Sequence[Key], samples: Sequence[Any], error: Exception) -> ConfigError:
        """Why ``samples`` make no batch."""
        first = form(samples[0])
        for (i, _), sample in zip(keys, samples, strict=True):
            if form(sample) != first:
                one, other = where(self._dataset, keys[0][0]), where(self._dataset, i)
                return ConfigError(
                    f"{one} is {first} and {other} is {form(sample)}: samples of several forms make no batch",
                    fix="let the data set pad, cut or scale all samples to one form",
                )
        return ConfigError(
            f"{where(self._dataset, keys[0][0])} cannot be put into a batch: {error}",
            fix="return tensors, arrays, numbers, strings, or tuples and dicts of them",
        )


def form(sample: Any) -> str:
    """Types and shapes, in words."""
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        return f"{str(sample.dtype).removeprefix('torch.')} {tuple(sample.shape)}"
    if isinstance(sample, dict):
        return "{" + ", ".join(f"{k}: {form(v)}" for k, v in sample.items()) + "}"
    if isinstance(sample, (tuple, list)):
        return "(" + ", ".join(map(form, sample)) + ")"
    return type(sample).__name__


@contextmanager
def _generators_kept() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
