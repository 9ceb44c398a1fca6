"""One pass over a dataset in order, split over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.seeds import derive_seed
from clustertrain.train.data.loader import MapStyleDataset, prefetch_batches, resolve_workers, unwrap_batch
from clustertrain.train.data.prefetch import DeviceTransfer
from clustertrain.train.data.sample_checks import Limits, SampleChecker
from clustertrain.train.data.sample_reader import BatchReader, SampleKey
from clustertrain.train.distributed.mesh import cores_per_rank

PREFETCH_BATCHES = 2  # micro-batches that each worker keeps ready


@dataclass(frozen=True)
class EvalBatch:
    """A collated micro-batch on the device."""

    batch: Any
    sample_indices: tuple[int, ...]
    """Dataset indices of the samples that count, which come first in the batch."""


class DatasetPass:
    """Micro-batches of one rank.

    All ranks have the same number, because the forward pass may be collective: a rank that runs out of samples repeats
    the first ones, which then do not count.
    """

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
        """Split ``dataset``.

        Args:
            max_samples: use only the first samples; 0 means all.
            group: number of adjacent samples that form a unit; an incomplete unit at the end is dropped.
            pad: fill smaller micro-batches with samples that do not count.
            limits: input limits of the model.

        Raises:
            ConfigError: there is nothing to evaluate.
        """
        dataset_size = len(dataset)
        count = min(dataset_size, max_samples) if max_samples else dataset_size
        if dataset_size < 1:
            raise ConfigError("the validation dataset is empty", fix="add samples, or disable the evaluation")
        if count < group:
            raise ConfigError(
                f"the validation data has {count} samples, and the loss compares {group} with each other",
                fix="use more of it (evaluation.samples, data.validation), or smaller groups",
            )
        self.num_samples = count - count % group
        self._micro_batch = -(-micro_batch // group) * group
        self._group = group
        self._rank, self._ranks = rank, ranks
        self._pad = pad
        # Seeded by index, so that random transforms are the same in each evaluation, on any rank and in any worker.
        self._reader = BatchReader(dataset, derive_seed(seed, "evaluation"), SampleChecker(limits or Limits()))
        self._workers = workers
        self._seed = seed
        self._device = device
        self._to_device = DeviceTransfer(device)

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Yield the samples that count, by micro-batch; in each round, all ranks together read contiguous samples."""
        stride = self._micro_batch * self._ranks
        for first in range(self._rank * self._micro_batch, -(-self.num_samples // stride) * stride, stride):
            yield tuple(range(first, min(first + self._micro_batch, self.num_samples)))

    def _pad_indices(self, counted: tuple[int, ...]) -> list[SampleKey]:
        num_padding = self._micro_batch - len(counted) if self._pad else 0 if counted else self._group
        return [(i, i) for i in (*counted, *(i % self.num_samples for i in range(num_padding)))]

    def __iter__(self) -> Iterator[EvalBatch]:
        # A generator, because there may be many samples.
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

    def _to_eval_batches(self, batches: Iterable[object]) -> Iterator[EvalBatch]:
        for batch, samples in zip(batches, self.indices(), strict=True):
            yield EvalBatch(self._to_device(unwrap_batch(batch)), samples)


class LoaderPass:
    """One pass over the batches of a script's loader, which yields this rank's part of the data.

    Ranks may have different numbers of batches. Samples that the loader repeats count each time.
    """

    def __init__(self, batches: Iterable[object], device: torch.device, any_rank: Callable[[bool], bool]) -> None:
        """Wrap ``batches``.

        Args:
            any_rank: returns whether its argument is true on any rank; called once per round.
        """
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
                    "evaluate: the loader yields nothing on this rank, but batches on others",
                    fix="pass the dataset to session.evaluate, which splits it over the ranks",
                )
        if last_batch is None:
            raise ConfigError("the validation data is empty", fix="pass a loader that yields batches (inputs, target)")


def _batch_length(batch: object) -> int:
    leaf = next((t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()), ())
    return len(leaf)


@dataclass(frozen=True)
class DatasetPassConfig:
    """How a dataset is split; see :class:`DatasetPass`."""

    micro_batch: int
    max_samples: int = 0
    workers: int = 0
    group: int = 1
    limits: Limits | None = None


def build_pass(
    data: MapStyleDataset | Iterable[object],
    config: DatasetPassConfig,
    context: RankContext,
    seed: int,
    any_rank: Callable[[bool], bool],
) -> Iterable[EvalBatch]:
    """Return this rank's pass over a dataset or a script's batches; raise ConfigError if the dataset is empty."""
    if isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        return LoaderPass(data, context.device, any_rank)
    return build_dataset_pass(cast(MapStyleDataset, data), config, context, seed)


def build_dataset_pass(
    dataset: MapStyleDataset, config: DatasetPassConfig, context: RankContext, seed: int
) -> DatasetPass:
    """Return this rank's pass over ``dataset``; raise ConfigError if it is empty."""
    return DatasetPass(
        dataset,
        micro_batch=config.micro_batch,
        rank=context.data_rank,
        ranks=context.layout.data_parallel,
        workers=resolve_workers(config.workers, context.device, cores_per_rank(context)),
        seed=seed,
        device=context.device,
        max_samples=config.max_samples,
        group=config.group,
        pad=context.layout.pp > 1,
        limits=config.limits,
    )
