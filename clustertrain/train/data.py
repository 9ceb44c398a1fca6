"""Batches in a global order that does not depend on the number of ranks or workers, with one number as position."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from clustertrain import clock
from clustertrain.errors import CheckpointError, ConfigError
from clustertrain.plan import batch as batches
from clustertrain.train import order, profiling
from clustertrain.train.seeds import derive
from clustertrain.train.stop import SIGNALS

_NOBODYS = -1  # the place of a sample that fills a micro-batch and counts for nothing


class MapStyle(Protocol):
    """Any map-style data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Any: ...


class _Numbered(Dataset[Any]):
    """Samples by (sample, position). In a worker every generator is seeded by the position first, so that a random
    augmentation depends neither on the worker nor on where it was interrupted. In the rank's own process the generators
    are those that the checkpoint holds, and are left alone."""

    def __init__(self, dataset: MapStyle, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        sample, position = key
        if get_worker_info() is not None:
            seed = derive(self._seed, "sample", position)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
        return self._dataset[sample]


class _Positions(Sampler[list[tuple[int, int]]]):
    """Endless micro-batches of (sample, position) of one rank, from ``start`` on."""

    def __init__(self, loader: Loader, start: int) -> None:
        self._loader = loader
        self._start = start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        start = self._start
        while True:
            yield from self._loader.micro_batches_at(start)
            start = self._loader.after(start)


class Loader:
    """An endless iterator over this rank's part of each global batch, one item an optimizer step.

    An item is a collated batch on the session's device, or with ``micro_batch`` a list of them, equally many on all
    ranks. ``position`` is how far all ranks together have come in the stream of samples; that and what
    :meth:`leave_out` was told is all the state there is. What the data set says of itself in an attribute ``version``
    (a string) is kept beside it, to be compared when a run resumes.

    ``micro_batch`` is the size of the largest ones.
    ``latest`` is the item that was handed out last and ``places`` the position of each of its samples in the run, one
    int64 tensor a micro-batch; ``fresh``: no step has been done since. Where the global batch does not divide
    (``ragged``), micro-batches differ in size, and a rank that
    has run out of samples gets one that is not its own, with place -1: it counts for nothing.
    """

    def __init__(
        self,
        dataset: MapStyle,
        *,
        global_batch: int,
        micro_batch: int | None,
        workers: int,
        seed: int,
        rank: int,
        ranks: int,
        device: torch.device,
        ragged: bool = False,
    ) -> None:
        """``rank`` of ``ranks`` counts data-parallel ranks. Raises ConfigError when the numbers do not divide and
        ``ragged`` is false; in any case for fewer samples a step than ranks."""
        if len(dataset) < 1:
            raise ConfigError("the data set is empty")
        self.global_batch = global_batch
        self.position = 0
        self.taken = 0  # samples that all ranks together have taken in this session
        self._left_out = order.LeftOut()
        self.wait_s = 0.0  # spent waiting for data since the session last asked
        self._dataset = dataset
        version = getattr(dataset, "version", None)
        self._version = version if isinstance(version, str) else None
        if not ragged:
            batches.check_divides(global_batch, ranks, micro_batch)
        self._first, self._share = batches.share_of(global_batch, ranks, rank)
        largest = batches.share_of(global_batch, ranks, 0)[1]
        self._micro = self.micro_batch = micro_batch or largest
        self._rounds = -(-largest // self._micro)
        self._as_list = micro_batch is not None
        self.ragged = global_batch % (ranks * self._micro) != 0
        self.latest: Any = None
        self.fresh = False
        self.places: list[torch.Tensor] = []
        self._workers = workers
        self._seed = seed
        self._device = device
        self._iterator: Iterator[Any] | None = None
        self._closing: Any = None

    def micro_batches_at(self, position: int) -> list[list[tuple[int, int]]]:
        """This rank's (sample, position) pairs of the global batch that starts at ``position``, by micro-batch."""
        pairs: list[tuple[int, int]] = []
        ahead = self._first  # the samples of the ranks before this one
        for first, count in self._left_out.runs(position, self._first + self._share):
            skipped = min(ahead, count)
            ahead, first, count = ahead - skipped, first + skipped, count - skipped  # noqa: PLW2901
            found = order.samples(self._seed, len(self._dataset), first, count)
            pairs += [(sample, first + i) for i, sample in enumerate(found)]
        parts = [pairs[i * self._micro : (i + 1) * self._micro] for i in range(self._rounds)]
        return [part or [(0, _NOBODYS)] for part in parts]

    def after(self, position: int) -> int:
        """Where the global batch ends that starts at ``position``."""
        first, count = self._left_out.runs(position, self.global_batch)[-1]
        return first + count

    def leave_out(self, ranges: Sequence[Sequence[int]]) -> None:
        """From now on take nothing from these (first, end) ranges of positions; those told before stay. They are the
        same on any number of ranks, and in the state."""
        self.close()
        for first, end in ranges:
            self._left_out.add(first, end)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        started = clock.monotonic()
        if self._iterator is None:
            self._iterator = self._start()
        parts = []
        for _ in range(self._rounds):
            with profiling.part("data"):
                batch = next(self._iterator)
            with profiling.part("host_to_device"):
                # default_collate makes lists of tuples, and a pair that is a list looks like two micro-batches.
                parts.append(self._to_device(tuple(batch) if isinstance(batch, list) else batch))
        self.places = [torch.tensor([p for _, p in keys]) for keys in self.micro_batches_at(self.position)]
        self.position = self.after(self.position)
        self.taken += self.global_batch
        self.wait_s += clock.monotonic() - started
        self.latest = parts if self._as_list else parts[0]
        self.fresh = True
        return self.latest

    def _start(self) -> Iterator[Any]:
        numbered = _Numbered(self._dataset, self._seed)
        if self._workers == 0:
            # Without DataLoader: its iterator draws from torch's global generator, so a resume would draw once more.
            return (default_collate([numbered[k] for k in keys]) for keys in _Positions(self, self.position))
        seed = derive(self._seed, "workers")
        found, self._closing = read_ahead(numbered, _Positions(self, self.position), self._workers, self._device, seed)
        return found

    def _to_device(self, batch: Any) -> Any:
        return batch if self._device.type == "cpu" else move(batch, self._device)

    def close(self) -> None:
        """End the workers."""
        if self._closing is not None:
            self._closing.value = 1
        self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "position": self.position,
            "seed": self._seed,
            "samples": len(self._dataset),
        }
        if self._left_out.ranges:
            state["left_out"] = [list(r) for r in self._left_out.ranges]
        return state if self._version is None else {**state, "version": self._version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError for a data set of another length, whose order would be another one, or of another
        version."""
        if state["samples"] != len(self._dataset):
            raise CheckpointError(
                f"the data set has {len(self._dataset)} samples, and had {state['samples']} when it was saved",
                fix="train on the same data, or begin a new run",
            )
        saved = state.get("version")
        if None not in (saved, self._version) and saved != self._version:
            raise CheckpointError(
                f"the data set is of version {self._version}, and was of {saved} when it was saved",
                fix="train on the same data, or begin a new run",
            )
        self.close()
        self.position, self._seed = state["position"], state["seed"]
        self._left_out = order.LeftOut(state.get("left_out", ()))


def read_ahead(
    dataset: Dataset[Any], batches: Iterable[list[Any]], workers: int, device: torch.device, seed: int
) -> tuple[Iterator[Any], Any]:
    """Collated batches that processes of their own read, and a shared value: set it to 1 before the iterator is
    dropped, and the workers may be ended."""
    closing = multiprocessing.get_context().Value("b", 0, lock=False)
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=_WorkerSignals(closing),
        generator=torch.Generator().manual_seed(seed),
    )
    # Blocked until the worker has its own handlers: between fork and then, a warning to the job would kill it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return iter(loader), closing
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _WorkerSignals:
    """Keeps a warning meant for the job from killing a worker; only its own rank may end it."""

    def __init__(self, closing: Any) -> None:
        self._closing = closing

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:
            # A handler and not SIG_IGN, which processes that the worker starts would inherit.
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._closing.value:
            os._exit(0)


def move(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {k: move(v, device) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(v, device) for v in batch)
    return batch
