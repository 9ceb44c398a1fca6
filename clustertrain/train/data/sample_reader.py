"""Reading of one micro-batch: samples in order, each with freshly seeded generators, collated and checked."""

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
from clustertrain.train.core.seeds import derive_seed
from clustertrain.train.data.sample_checks import SampleChecker, describe_sample

SampleKey = tuple[int, int]  # (sample, its position in the run)


class MapStyleDataset(Protocol):
    """Interface of a map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Any: ...


@dataclass(frozen=True)
class ReadFailure:
    """A worker's ConfigError, returned as a value: DataLoader would replace a raised one's message by a traceback."""

    message: str
    fix: str | None


class BatchReader(Dataset[Any]):
    """Reader of micro-batches, given the keys of their samples.

    Python's, numpy's and torch's generators are seeded with the position before each sample is read, so random
    augmentation does not depend on ranks, workers and interruptions.
    """

    def __init__(self, dataset: MapStyleDataset, seed: int, checker: SampleChecker | None = None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._checker = checker

    def read(self, keys: Sequence[SampleKey]) -> Any:
        """Return the micro-batch in the rank's process, preserving its generators, which checkpoints hold.

        Raises:
            ConfigError: a sample is unusable; the message names it.
        """
        with preserved_rng_states():
            return self._read_batch(keys)

    def __getitems__(self, keys: Sequence[SampleKey]) -> Any:
        """Return the micro-batch in a worker; torch's fetcher calls this for a whole batch."""
        try:
            return self._read_batch(keys)
        except ConfigError as e:
            return ReadFailure(e.message, e.fix)

    def _read_batch(self, keys: Sequence[SampleKey]) -> Any:
        samples = [self._read_sample(*key) for key in keys]
        try:
            batch = default_collate(samples)
        except (RuntimeError, TypeError, KeyError) as e:
            raise self._collate_error(keys, samples, e) from e
        if self._checker is not None:
            self._checker(batch, keys, self._dataset)
        return batch

    def _read_sample(self, sample: int, position: int) -> Any:
        seed_generators(derive_seed(self._seed, "sample", position))
        try:
            return self._dataset[sample]
        except Exception as e:
            e.add_note(f"while {describe_sample(self._dataset, sample)} was read")
            raise

    def _collate_error(self, keys: Sequence[SampleKey], samples: Sequence[Any], error: Exception) -> ConfigError:
        """Return the error that explains why ``samples`` cannot be collated."""
        expected = format_structure(samples[0])
        for (i, _), sample in zip(keys, samples, strict=True):
            if format_structure(sample) != expected:
                baseline, other = describe_sample(self._dataset, keys[0][0]), describe_sample(self._dataset, i)
                return ConfigError(
                    f"{baseline} is {expected} and {other} is {format_structure(sample)}: samples of different shapes"
                    " or types cannot be batched",
                    fix="pad, crop or resize all samples in the dataset to one shape",
                )
        return ConfigError(
            f"{describe_sample(self._dataset, keys[0][0])} cannot be put into a batch: {error}",
            fix="return tensors, arrays, numbers, strings, or tuples and dicts of them",
        )


def format_structure(sample: Any) -> str:
    """Return the types and shapes in a sample as text."""
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        return f"{str(sample.dtype).removeprefix('torch.')} {tuple(sample.shape)}"
    if isinstance(sample, dict):
        return "{" + ", ".join(f"{k}: {format_structure(v)}" for k, v in sample.items()) + "}"
    if isinstance(sample, (tuple, list)):
        return "(" + ", ".join(map(format_structure, sample)) + ")"
    return type(sample).__name__


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, numpy and torch's CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_rng_states() -> Iterator[None]:
    """Restore the states of these generators after the block."""
    saved_states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(saved_states[0])
        np.random.set_state(saved_states[1])
        torch.set_rng_state(saved_states[2])
