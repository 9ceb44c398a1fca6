"""Batches in a global order that does not depend on the number of ranks and workers and resumes from one position."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from clustertrain import clock
from clustertrain.config.data import MAX_AUTO_WORKERS
from clustertrain.errors import CheckpointError, ConfigError, UnsuitableEnvironment
from clustertrain.plan.batch import check_divides, rank_sample_range
from clustertrain.train.core import step_timer
from clustertrain.train.core.seeds import derive_seed
from clustertrain.train.core.stop import SIGNALS
from clustertrain.train.data import permutation
from clustertrain.train.data.prefetch import DeviceTransfer
from clustertrain.train.data.sample_checks import Limits, SampleChecker, format_samples
from clustertrain.train.data.sample_reader import BatchReader, MapStyleDataset, ReadFailure, SampleKey

__all__ = ["Loader", "MapStyleDataset", "resolve_workers"]

# A socket's path has at most 107 bytes (Linux, unix(7)), and multiprocessing adds "/pymp-xxxxxxxx/listener-xxxxxxxx".
MAX_TMPDIR_LENGTH = 107 - 32
PADDING_POSITION = -1  # position of a sample that only fills a micro-batch and does not count


class _MicroBatchSampler(Sampler[list[tuple[int, int]]]):
    """Endless sequence of one rank's micro-batches as (sample, position) pairs, from position ``start`` on."""

    def __init__(self, loader: Loader, start: int) -> None:
        self._loader = loader
        self._start = start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        start = self._start
        while True:
            yield from self._loader.micro_batches_at(start)
            start = self._loader.next_position(start)


class Loader:
    """Endless iterator over this rank's part of each global batch; one item per optimizer step.

    An item is a collated batch on the session's device. With ``micro_batch`` it is a list of them, of the same length
    on all ranks. The state consists of ``position``, the excluded ranges and the dataset's ``version`` string, which a
    resume compares.

    If the global batch does not divide evenly (``ragged``), micro-batches differ in size. A rank that runs out of
    samples repeats its first one with position -1, which excludes it from the loss.
    """

    def __init__(
        self,
        dataset: MapStyleDataset,
        *,
        global_batch: int,
        micro_batch: int | None,
        workers: int,
        seed: int,
        rank: int,
        ranks: int,
        device: torch.device,
        ragged: bool = False,
        prefetch: int = 2,
        limits: Limits | None = None,
    ) -> None:
        """Create a loader for data-parallel ``rank`` of ``ranks``.

        Args:
            workers: processes that each keep ``prefetch`` micro-batches ready.
            limits: input limits of the model.

        Raises:
            ConfigError: the sizes do not divide and ``ragged`` is false, or a step has fewer samples than ranks.
        """
        if len(dataset) < 1:
            name = getattr(dataset, "name", "")
            raise ConfigError(f"the dataset is empty{f': {name}' if name else ''}", fix="choose a dataset with samples")
        self.global_batch = global_batch
        self.position = 0
        """Position of all ranks together in the stream of samples."""
        self.samples_consumed = 0
        """Samples consumed by all ranks together in this session."""
        self._excluded = permutation.ExcludedRanges()
        self.wait_s = 0.0
        """Seconds spent waiting for data since the session last reset it."""
        self._dataset = dataset
        version = getattr(dataset, "version", None)
        self._version = version if isinstance(version, str) else None
        if not ragged:
            check_divides(global_batch, ranks, micro_batch)
        self._rank, self._ranks = rank, ranks
        largest = rank_sample_range(global_batch, ranks, 0)[1]
        self._micro_batch_size = self.micro_batch = micro_batch or largest
        """Size of the largest micro-batches."""
        self._micro_batches_per_step = -(-largest // self._micro_batch_size)
        self._yields_list = micro_batch is not None
        self.ragged = global_batch % (ranks * self._micro_batch_size) != 0
        self.last_item: Any = None
        """The most recent item."""
        self.is_unconsumed = False
        """Whether no step has used ``last_item`` yet."""
        self.sample_positions: list[torch.Tensor] = []
        """Position in the run of each sample of ``last_item``, one int64 tensor per micro-batch."""
        self._workers = workers
        self._prefetch = prefetch
        self._seed = seed
        self._device = device
        self._limits = limits or Limits()
        self._to_device = DeviceTransfer(device)
        self._iterator: Iterator[Any] | None = None
        self._shutdown_flag: Any = None

    def micro_batches_at(self, position: int, rank: int | None = None) -> list[list[tuple[int, int]]]:
        """Return the (sample, position) pairs of the global batch at ``position``, by micro-batch, for ``rank``
        (default: this one)."""
        first, share = rank_sample_range(self.global_batch, self._ranks, self._rank if rank is None else rank)
        pairs = self._sample_pairs(position, first, share)
        micro_batches = [
            pairs[i * self._micro_batch_size : (i + 1) * self._micro_batch_size]
            for i in range(self._micro_batches_per_step)
        ]
        # Repeat one of the rank's samples: a NaN from outside the global batch would spoil the step.
        return [micro_batch or [(pairs[0][0], PADDING_POSITION)] for micro_batch in micro_batches]

    def _sample_pairs(self, position: int, skip: int, share: int) -> list[tuple[int, int]]:
        """Return ``share`` (sample, position) pairs of the global batch at ``position``, after the first ``skip``."""
        pairs: list[tuple[int, int]] = []
        for first, count in self._excluded.included_runs(position, skip + share):
            skipped = min(skip, count)
            skip, first, count = skip - skipped, first + skipped, count - skipped  # noqa: PLW2901
            samples = permutation.samples_at(self._seed, len(self._dataset), first, count)
            pairs += [(sample, first + i) for i, sample in enumerate(samples)]
        return pairs

    def describe_batch(self, position: int, micro_batch: int = -1) -> str:
        """Return a text that names the samples of the global batch at ``position``.

        With ``micro_batch``, numbered over all data-parallel ranks, it names only the samples of that micro-batch.
        """
        pairs, scope = self._select(position, micro_batch)
        first, last = (divmod(pairs[i][1], len(self._dataset))[0] for i in (0, -1))
        epochs = f"epoch {first}" if first == last else f"epochs {first} and {last}"
        return f"{scope}, {epochs}: {format_samples(self._dataset, [sample for sample, _ in pairs])}"

    def _select(self, position: int, micro_batch: int) -> tuple[list[tuple[int, int]], str]:
        """Return the (sample, position) pairs that :meth:`describe_batch` names, and what they are."""
        if micro_batch < 0:
            return self._sample_pairs(position, 0, self.global_batch), "the global batch"
        rank, index = divmod(micro_batch, self._micro_batches_per_step)
        return self.micro_batches_at(position, rank)[index], f"micro-batch {index} of data-parallel rank {rank}"

    def next_position(self, position: int) -> int:
        """Return the position after the global batch that starts at ``position``."""
        first, count = self._excluded.included_runs(position, self.global_batch)[-1]
        return first + count

    def exclude(self, ranges: Sequence[Sequence[int]]) -> None:
        """Skip these (first, end) ranges of positions from now on, in addition to earlier ones.

        The ranges do not depend on the number of ranks, and are part of the state.
        """
        self.close()
        for first, end in ranges:
            self._excluded.add(first, end)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        started = clock.monotonic()
        if self._iterator is None:
            self._iterator = self._start_reading()
        micro_batches = []
        for _ in range(self._micro_batches_per_step):
            with step_timer.record_part("data"):
                batch = unwrap_batch(next(self._iterator))
            with step_timer.record_part("host_to_device"):
                micro_batches.append(self._to_device(batch))
        self.sample_positions = [torch.tensor([p for _, p in keys]) for keys in self.micro_batches_at(self.position)]
        self.position = self.next_position(self.position)
        self.samples_consumed += self.global_batch
        self.wait_s += clock.monotonic() - started
        self.last_item = micro_batches if self._yields_list else micro_batches[0]
        self.is_unconsumed = True
        return self.last_item

    def _start_reading(self) -> Iterator[Any]:
        is_run_start = self.position == 0 and not self._excluded.ranges
        reader = BatchReader(self._dataset, self._seed, SampleChecker(self._limits, check_finite=is_run_start))
        if self._workers == 0:
            # No DataLoader: its iterator draws from torch's global generator, so a resume would draw once more.
            return (reader.read(keys) for keys in _MicroBatchSampler(self, self.position))
        seed, positions = derive_seed(self._seed, "workers"), _MicroBatchSampler(self, self.position)
        iterator, self._shutdown_flag = prefetch_batches(
            reader, positions, self._workers, self._device, seed, self._prefetch
        )
        return iterator

    def close(self) -> None:
        """Stop the workers."""
        if self._shutdown_flag is not None:
            self._shutdown_flag.value = 1
        self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, seed, dataset size, excluded ranges and version."""
        state: dict[str, Any] = {
            "position": self.position,
            "seed": self._seed,
            "samples": len(self._dataset),
        }
        if self._excluded.ranges:
            state["excluded"] = [list(r) for r in self._excluded.ranges]
        return state if self._version is None else {**state, "version": self._version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            CheckpointError: the dataset's length, which determines the order, or its version differs.
        """
        if state["samples"] != len(self._dataset):
            raise CheckpointError(
                f"the dataset has {len(self._dataset)} samples, but the checkpoint was saved with {state['samples']}",
                fix="train on the same data, or start a new run",
            )
        self._check_version(state.get("version"))
        self.close()
        self.position, self._seed = state["position"], state["seed"]
        self._excluded = permutation.ExcludedRanges(state.get("excluded", ()))

    def _check_version(self, saved: str | None) -> None:
        if None not in (saved, self._version) and saved != self._version:
            raise CheckpointError(
                f"the dataset has version {self._version}, but the checkpoint was saved with {saved}",
                fix="train on the same data, or start a new run",
            )


def prefetch_batches(
    reader: BatchReader,
    batches: Iterable[list[SampleKey]],
    workers: int,
    device: torch.device,
    seed: int,
    prefetch: int,
) -> tuple[Iterator[Any], Any]:
    """Return an iterator over micro-batches read by worker processes, and their shutdown flag.

    Each worker keeps ``prefetch`` micro-batches ready. Pass each micro-batch through :func:`unwrap_batch`. Set the
    flag's value to 1 before dropping the iterator, so that the workers can exit.
    """
    _check_tmpdir()
    shutdown_flag = multiprocessing.get_context().Value("b", 0, lock=False)
    loader = DataLoader(
        reader,
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=prefetch,
        collate_fn=_identity_collate,  # the reader collates
        pin_memory=device.type == "cuda",
        worker_init_fn=_WorkerSignals(shutdown_flag),
        generator=torch.Generator().manual_seed(seed),
    )
    # Workers inherit the mask until they install their handlers: before that, a warning signal to the job would kill
    # them.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return iter(loader), shutdown_flag
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _check_tmpdir() -> None:
    """Raise UnsuitableEnvironment if TMPDIR is too long for the workers' sockets.

    Otherwise Python only logs an error, the workers deliver no batch, and the rank waits forever.
    """
    tmpdir = tempfile.gettempdir()
    if len(os.fsencode(tmpdir)) > MAX_TMPDIR_LENGTH:
        raise UnsuitableEnvironment(
            f"TMPDIR = {tmpdir!r} is too long for the sockets of data workers: {len(tmpdir)} characters",
            fix=f"set TMPDIR to a path of at most {MAX_TMPDIR_LENGTH} characters, or set data.workers = 0",
        )


def unwrap_batch(batch: Any) -> Any:
    """Return a reader's batch, with a list converted to a tuple.

    torch turns tuples into lists, and in this package a list means micro-batches.

    Raises:
        ConfigError: a worker reported a failure.
    """
    if isinstance(batch, ReadFailure):
        raise ConfigError(batch.message, fix=batch.fix)
    return tuple(batch) if isinstance(batch, list) else batch


class _WorkerSignals:
    """Signal handlers of a worker: ignore warning signals meant for the job; only the worker's rank may end it."""

    def __init__(self, shutdown_flag: Any) -> None:
        self._shutdown_flag = shutdown_flag

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:
            # Not SIG_IGN: child processes of the worker would inherit it.
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._shutdown_flag.value:
            os._exit(0)


def _identity_collate(batch: Any) -> Any:
    return batch


def resolve_workers(requested: int, device: torch.device, cores: int) -> int:
    """Return the number of workers of a rank with ``cores`` cores, for ``data.workers = requested``.

    With -1, one core is left for the rank. On the CPU all cores are, because the rank computes on them.
    """
    if requested >= 0:
        return requested
    return 0 if device.type == "cpu" else max(1, min(MAX_AUTO_WORKERS, cores - 1))
