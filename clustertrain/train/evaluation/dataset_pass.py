"""One pass over a data set in its own order, split over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.seeds import derive
from clustertrain.train.data.loader import MapStyle, read_ahead, settled
from clustertrain.train.data.prefetch import ToDevice
from clustertrain.train.data.sample_checks import Check, Limits
from clustertrain.train.data.sample_reader import Key, Reader

AHEAD = 2  # micro-batches that each worker holds ready


@dataclass(frozen=True)
class Portion:
    """A collated micro-batch on the device; ``samples`` are the first ones in it that count, by their index."""

    batch: Any
    samples: tuple[int, ...]


class OnePass:
    """The micro-batches of ``rank``, equally many on all ranks, since the forward pass may be collective: a rank that
    has run out of samples repeats the first ones, and none of them counts."""

    def __init__(
        self,
        dataset: MapStyle,
        *,
        micro_batch: int,
        rank: int,
        ranks: int,
        workers: int,
        seed: int,
        device: torch.device,
        samples: int = 0,
        group: int = 1,
        full: bool = False,
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
        there = len(dataset)
        count = min(there, samples) if samples else there
        if there < 1:
            raise ConfigError("the validation data set is empty", fix="give it samples, or leave the evaluation out")
        if count < group:
            raise ConfigError(
                f"the validation data has {count} samples, and {group} of them are compared with each other",
                fix="give more of it (evaluation.samples, data.validation), or make the groups smaller",
            )
        self.samples = count - count % group
        self._micro_batch = -(-micro_batch // group) * group
        self._group = group
        self._rank, self._ranks = rank, ranks
        self._full = full
        # By index, so that what is random in a data set is the same in each evaluation, on any rank and in any worker.
        self._reader = Reader(dataset, derive(seed, "evaluation"), Check(limits or Limits()))
        self._workers = workers
        self._seed = seed
        self._device = device
        self._to_device = ToDevice(device)

    def indices(self) -> Iterator[tuple[int, ...]]:
        """By micro-batch the samples that count; a round of all ranks is contiguous."""
        stride = self._micro_batch * self._ranks
        for first in range(self._rank * self._micro_batch, -(-self.samples // stride) * stride, stride):
            yield tuple(range(first, min(first + self._micro_batch, self.samples)))

    def _filled(self, counted: tuple[int, ...]) -> list[Key]:
        missing = self._micro_batch - len(counted) if self._full else 0 if counted else self._group
        return [(i, i) for i in (*counted, *(i % self.samples for i in range(missing)))]

    def __iter__(self) -> Iterator[Portion]:
        # Nothing is listed: there may be very many samples.
        wanted = (self._filled(samples) for samples in self.indices())
        if self._workers == 0:
            yield from self._portions(self._reader.read(some) for some in wanted)
            return
        seed = derive(self._seed, "evaluation workers")
        batches, closing = read_ahead(self._reader, wanted, self._workers, self._device, seed, AHEAD)
        try:
            yield from self._portions(batches)
        finally:
            closing.value = 1

    def _portions(self, batches: Iterable[Any]) -> Iterator[Portion]:
        for batch, samples in zip(batches, self.indices(), strict=True):
            yield Portion(self._to_device(settled(batch)), samples)


class Given:
    """The batches of a loader of the script's own, one pass over this rank's part of them; ranks may have different
    numbers of them. What it repeats counts as often as it yields it."""

    def __init__(self, batches: Iterable[Any], device: torch.device, any_rank: Callable[[bool], bool]) -> None:
        """``any_rank``: whether a flag is set on any rank; it is asked once a round."""
        self._batches = batches
        self._to_device = ToDevice(device)
        self._any_rank = any_rank

    def __iter__(self) -> Iterator[Portion]:
        left, before = iter(self._batches), None
        while True:
            batch = next(left, None)
            if not self._any_rank(batch is not None):
                break
            if batch is not None:
                before = self._to_device(settled(batch))
                yield Portion(before, tuple(range(_length(before))))
            elif before is not None:
                yield Portion(before, ())
            else:
                raise UsageError(
                    "evaluate: the loader yields nothing on this rank, and batches on others",
                    fix="hand session.evaluate the data set, which it splits over the ranks by itself",
                )
        if before is None:
            raise ConfigError("the validation data is empty", fix="a loader must yield batches (inputs, target)")


def _length(batch: Any) -> int:
    found = next((t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()), ())
    return len(found)


@dataclass(frozen=True)
class Cut:
    """How a data set is cut up; see :class:`OnePass`."""

    micro_batch: int
    samples: int = 0
    workers: int = 0
    group: int = 1
    limits: Limits | None = None


def cut_up(
    data: MapStyle | Iterable[Any], cut: Cut, context: RankContext, seed: int, any_rank: Callable[[bool], bool]
) -> Iterable[Portion]:
    """This rank's part of a data set, or of batches of the script's own. Raises ConfigError for an empty data set."""
    if isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        return Given(data, context.device, any_rank)
    return OnePass(
        cast(MapStyle, data),
        micro_batch=cut.micro_batch,
        rank=context.data_rank,
        ranks=context.layout.data_parallel,
        workers=cut.workers,
        seed=seed,
        device=context.device,
        samples=cut.samples,
        group=cut.group,
        full=context.layout.pp > 1,
        limits=cut.limits,
    )
