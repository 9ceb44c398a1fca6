"""One pass over a data set in its own order, split over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.seeds import derive_seed
from clustertrain.train.data.loader import MapStyleDataset, prefetch_batches, unwrap_batch
from clustertrain.train.data.prefetch import DeviceTransfer
from clustertrain.train.data.sample_checks import Limits, SampleChecker
from clustertrain.train.data.sample_reader import BatchReader, SampleKey

PREFETCH_BATCHES = 2  # micro-batches that each worker holds ready


@dataclass(frozen=True)
class EvalBatch:
    """A collated micro-batch on the device; ``sample_indices`` are the first ones in it that count, by their index."""

    batch: Any
    sample_indices: tuple[int, ...]


class DatasetPass:
    """The micro-batches of ``rank``, equally many on all ranks, since the forward pass may be collective: a rank that
    has run out of samples repeats the first ones, and none of them counts."""

    def __init__(
        self,
        dataset: MapStyleDataset,
        *,
        micro_batch: int,
        rank: int,
        ranks: int,
        workers: int,
        seed: int,
        device: torch.device,
        max_samples: int = 0,
        group: int = 1,
        pad: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """
        Args:
            samples: at most so many, from the first on; 0: all.
            group: neighbouring samples that only mean something together; what is left over at the end is left out.
            full: fill up smaller micro-batches with samples that do not count.
            limits: what the model takes.

        Raises:
            ConfigError: there is nothing to evaluate on.
        """
        dataset_size = len(dataset)
        count = min(dataset_size, max_samples) if max_samples else dataset_size
        if dataset_size < 1:
            raise ConfigError("the validation data set is empty", fix="give it samples, or leave the evaluation out")
        if count < group:
            raise ConfigError(
                f"the validation data has {count} samples, and {group} of them are compared with each other",
                fix="give more of it (evaluation.samples, data.validation), or make the groups smaller",
            )
        self.num_samples = count - count % group
        self._micro_batch = -(-micro_batch // group) * group
        self._group = group
        self._rank, self._ranks = rank, ranks
        self._pad = pad
        # By index, so that what is random in a data set is the same in each evaluation, on any rank and in any worker.
        self._reader = BatchReader(dataset, derive_seed(seed, "evaluation"), SampleChecker(limits or Limits()))
        self._workers = workers
        self._seed = seed
        self._device = device
        self._to_device = DeviceTransfer(device)

    def indices(self) -> Iterator[tuple[int, ...]]:
        """By micro-batch the samples that count; a round of all ranks is contiguous."""
        stride = self._micro_batch * self._ranks
        for first in range(self._rank * self._micro_batch, -(-self.num_samples // stride) * stride, stride):
            yield tuple(range(first, min(first + self._micro_batch, self.num_samples)))

    def _pad_indices(self, counted: tuple[int, ...]) -> list[SampleKey]:
        num_padding = self._micro_batch - len(counted) if self._pad else 0 if counted else self._group
        return [(i, i) for i in (*counted, *(i % self.num_samples for i in range(num_padding)))]

    def __iter__(self) -> Iterator[EvalBatch]:
        # Nothing is listed: there may be very many samples.
        sample_keys = (self._pad_indices(samples) for samples in self.indices())
        if self._workers == 0:
            yield from self._to_eval_batches(self._reader.read(keys) for keys in sample_keys)
            return
        seed = derive_seed(self._seed, "evaluation workers")
        batches, shutdown_flag = prefetch_batches(
            self._reader, sample_keys, self._workers, self._device, seed, PREFETCH_BATCHES
        )
        try:
            yield from self._to_eval_batches(batches)
        finally:
            shutdown_flag.value = 1

    def _to_eval_batches(self, batches: Iterable[Any]) -> Iterator[EvalBatch]:
        for batch, samples in zip(batches, self.indices(), strict=True):
            yield EvalBatch(self._to_device(unwrap_batch(batch)), samples)


class LoaderPass:
    """The batches of a loader of the script's own, one pass over this rank's part of them; ranks may have different
    numbers of them. What it repeats counts as often as it yields it."""

    def __init__(self, batches: Iterable[Any], device: torch.device, any_rank: Callable[[bool], bool]) -> None:
        """``any_rank``: whether a flag is set on any rank; it is asked once a round."""
        self._batches = batches
        self._to_device = DeviceTransfer(device)
        self._any_rank = any_rank

    def __iter__(self) -> Iterator[EvalBatch]:
        iterator, last_batch = iter(self._batches), None
        while True:
            batch = next(iterator, None)
            if not self._any_rank(batch is not None):
                break
            if batch is not None:
                last_batch = self._to_device(unwrap_batch(batch))
                yield EvalBatch(last_batch, tuple(range(_batch_length(last_batch))))
            elif last_batch is not None:
                yield EvalBatch(last_batch, ())
            else:
                raise UsageError(
                    "evaluate: the loader yields nothing on this rank, and batches on others",
                    fix="hand session.evaluate the data set, which it splits over the ranks by itself",
                )
        if last_batch is None:
            raise ConfigError("the validation data is empty", fix="a loader must yield batches (inputs, target)")


def _batch_length(batch: Any) -> int:
    leaf = next((t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()), ())
    return len(leaf)


@dataclass(frozen=True)
class DatasetPassConfig:
    """How a data set is cut up; see :class:`DatasetPass`."""

    micro_batch: int
    max_samples: int = 0
    workers: int = 0
    group: int = 1
    limits: Limits | None = None


def build_pass(
    data: MapStyleDataset | Iterable[Any],
    config: DatasetPassConfig,
    context: RankContext,
    seed: int,
    any_rank: Callable[[bool], bool],
) -> Iterable[EvalBatch]:
    """This rank's part of a data set, or of batches of the script's own. Raises ConfigError for an empty data set."""
    if isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        return LoaderPass(data, context.device, any_rank)
    return DatasetPass(
        cast(MapStyleDataset, data),
        micro_batch=config.micro_batch,
        rank=context.data_rank,
        ranks=context.layout.data_parallel,
        workers=config.workers,
        seed=seed,
        device=context.device,
        max_samples=config.max_samples,
        group=config.group,
        pad=context.layout.pp > 1,
        limits=config.limits,
    )
