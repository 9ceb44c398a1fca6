"""Batches in a global order that does not depend on the number of ranks or workers, with one number as position."""

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
from clustertrain.plan import batch as batches
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
_PADDING_POSITION = -1  # the place of a sample that fills a micro-batch and counts for nothing


class _MicroBatchSampler(Sampler[list[tuple[int, int]]]):
    """Endless micro-batches of (sample, position) of one rank, from ``start`` on."""

    def __init__(self, loader: Loader, start: int) -> None:
        self._loader = loader
        self._start = start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        start = self._start
        while True:
            yield from self._loader.micro_batches_at(start)
            start = self._loader.next_position(start)


class Loader:
    """An endless iterator over this rank's part of each global batch, one item an optimizer step.

    An item is a collated batch on the session's device, or with ``micro_batch`` a list of them, equally many on all
    ranks. ``position`` is how far all ranks together have come in the stream of samples; that and what
    :meth:`leave_out` was told is all the state there is. What the data set says of itself in an attribute ``version``
    (a string) is kept beside it, to be compared when a run resumes.

    ``micro_batch`` is the size of the largest ones.
    ``last_item`` is the item that was handed out last and ``sample_positions`` the position of each of its samples in
    the run, one
    int64 tensor a micro-batch; ``is_unconsumed``: no step has been done since. Where the global batch does not divide
    (``ragged``), micro-batches differ in size, and a rank that has run out of samples gets its first one once more,
    with place -1: it counts for nothing.
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
        """``rank`` of ``ranks`` counts data-parallel ranks; ``workers`` processes hold ``prefetch`` micro-batches each
        ready; ``limits`` is what the model takes. Raises ConfigError when the numbers do not divide and ``ragged`` is
        false; in any case for fewer samples a step than ranks."""
        if len(dataset) < 1:
            name = getattr(dataset, "name", "")
            raise ConfigError(f"the data set is empty{f': {name}' if name else ''}", fix="give one with samples")
        self.global_batch = global_batch
        self.position = 0
        self.samples_consumed = 0  # samples that all ranks together have taken in this session
        self._excluded = permutation.ExcludedRanges()
        self.wait_s = 0.0  # spent waiting for data since the session last asked
        self._dataset = dataset
        version = getattr(dataset, "version", None)
        self._version = version if isinstance(version, str) else None
        if not ragged:
            batches.check_divides(global_batch, ranks, micro_batch)
        self._rank, self._ranks = rank, ranks
        largest = batches.rank_sample_range(global_batch, ranks, 0)[1]
        self._micro_batch_size = self.micro_batch = micro_batch or largest
        self._micro_batches_per_step = -(-largest // self._micro_batch_size)
        self._yields_list = micro_batch is not None
        self.ragged = global_batch % (ranks * self._micro_batch_size) != 0
        self.last_item: Any = None
        self.is_unconsumed = False
        self.sample_positions: list[torch.Tensor] = []
        self._workers = workers
        self._prefetch = prefetch
        self._seed = seed
        self._device = device
        self._limits = limits or Limits()
        self._to_device = DeviceTransfer(device)
        self._iterator: Iterator[Any] | None = None
        self._shutdown_flag: Any = None

    def micro_batches_at(self, position: int, rank: int | None = None) -> list[list[tuple[int, int]]]:
        """The (sample, position) pairs of this rank, or another one, of the global batch that starts at ``position``,
        by micro-batch."""
        first, share = batches.rank_sample_range(self.global_batch, self._ranks, self._rank if rank is None else rank)
        pairs = self._sample_pairs(position, first, share)
        micro_batches = [
            pairs[i * self._micro_batch_size : (i + 1) * self._micro_batch_size]
            for i in range(self._micro_batches_per_step)
        ]
        # The rank's own sample: one that is not finite makes no step bad in whose global batch it is not.
        return [micro_batch or [(pairs[0][0], _PADDING_POSITION)] for micro_batch in micro_batches]

    def _sample_pairs(self, position: int, skip: int, share: int) -> list[tuple[int, int]]:
        """``share`` (sample, position) pairs of the global batch at ``position``, after the first ``skip``."""
        pairs: list[tuple[int, int]] = []
        for first, count in self._excluded.included_runs(position, skip + share):
            skipped = min(skip, count)
            skip, first, count = skip - skipped, first + skipped, count - skipped  # noqa: PLW2901
            samples = permutation.samples_at(self._seed, len(self._dataset), first, count)
            pairs += [(sample, first + i) for i, sample in enumerate(samples)]
        return pairs

    def describe_batch(self, position: int, micro_batch: int = -1) -> str:
        """The samples of the global batch that started at ``position``, in words; with the number of a ``micro_batch``,
        counted over all data-parallel ranks, those of it alone."""
        if micro_batch < 0:
            pairs, scope = self._sample_pairs(position, 0, self.global_batch), "the global batch"
        else:
            rank, index = divmod(micro_batch, self._micro_batches_per_step)
            pairs = self.micro_batches_at(position, rank)[index]
            scope = f"micro-batch {index} of data-parallel rank {rank}"
        first, last = (divmod(pairs[i][1], len(self._dataset))[0] for i in (0, -1))
        epochs = f"epoch {first}" if first == last else f"epochs {first} and {last}"
        return f"{scope}, {epochs}: {format_samples(self._dataset, [sample for sample, _ in pairs])}"

    def next_position(self, position: int) -> int:
        """Where the global batch ends that starts at ``position``."""
        first, count = self._excluded.included_runs(position, self.global_batch)[-1]
        return first + count

    def leave_out(self, ranges: Sequence[Sequence[int]]) -> None:
        """From now on take nothing from these (first, end) ranges of positions; those told before stay. They are the
        same on any number of ranks, and in the state."""
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
            # Without DataLoader: its iterator draws from torch's global generator, so a resume would draw once more.
            return (reader.read(keys) for keys in _MicroBatchSampler(self, self.position))
        seed, positions = derive_seed(self._seed, "workers"), _MicroBatchSampler(self, self.position)
        iterator, self._shutdown_flag = prefetch_batches(
            reader, positions, self._workers, self._device, seed, self._prefetch
        )
        return iterator

    def close(self) -> None:
        """End the workers."""
        if self._shutdown_flag is not None:
            self._shutdown_flag.value = 1
        self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "position": self.position,
            "seed": self._seed,
            "samples": len(self._dataset),
        }
        if self._excluded.ranges:
            state["left_out"] = [list(r) for r in self._excluded.ranges]
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
        self._excluded = permutation.ExcludedRanges(state.get("left_out", ()))


def prefetch_batches(
    reader: BatchReader,
    batches: Iterable[list[SampleKey]],
    workers: int,
    device: torch.device,
    seed: int,
    prefetch: int,
) -> tuple[Iterator[Any], Any]:
    """Micro-batches that processes of their own read, each ``prefetch`` of them ahead, to be :func:`unwrap_batch`; and
    a shared value: set it to 1 before the iterator is dropped, and the workers may be ended."""
    _check_tmpdir()
    shutdown_flag = multiprocessing.get_context().Value("b", 0, lock=False)
    loader = DataLoader(
        reader,
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=prefetch,
        collate_fn=_identity_collate,  # the reader has put it together
        pin_memory=device.type == "cuda",
        worker_init_fn=_WorkerSignals(shutdown_flag),
        generator=torch.Generator().manual_seed(seed),
    )
    # Blocked until the worker has its own handlers: between fork and then, a warning to the job would kill it.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return iter(loader), shutdown_flag
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _check_tmpdir() -> None:
    """Raises UnsuitableEnvironment where the workers could not hand over a single batch, and the rank would wait for
    ever: Python only writes into the log that their sockets' path is too long."""
    tmpdir = tempfile.gettempdir()
    if len(os.fsencode(tmpdir)) > MAX_TMPDIR_LENGTH:
        raise UnsuitableEnvironment(
            f"TMPDIR = {tmpdir!r} is too long for the sockets of data workers, {len(tmpdir)} characters",
            fix=f"set TMPDIR to a path of at most {MAX_TMPDIR_LENGTH}, or data.workers = 0",
        )


def unwrap_batch(batch: Any) -> Any:
    """What a reader gave, with a list as a tuple: torch makes lists of tuples, and a list is one of micro-batches here.

    Raises:
        ConfigError: what a worker found wrong.
    """
    if isinstance(batch, ReadFailure):
        raise ConfigError(batch.message, fix=batch.fix)
    return tuple(batch) if isinstance(batch, list) else batch


class _WorkerSignals:
    """Keeps a warning meant for the job from killing a worker; only its own rank may end it."""

    def __init__(self, shutdown_flag: Any) -> None:
        self._shutdown_flag = shutdown_flag

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:
            # A handler and not SIG_IGN, which processes that the worker starts would inherit.
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._shutdown_flag.value:
            os._exit(0)


def _identity_collate(batch: Any) -> Any:
    return batch


def resolve_workers(requested: int, device: torch.device, cores: int) -> int:
    """How many workers a rank gets that has ``cores``; ``requested`` is ``data.workers``. -1 leaves one core to the
    rank itself, and on the CPU, where they compute, all."""
    if requested >= 0:
        return requested
    return 0 if device.type == "cpu" else max(1, min(MAX_AUTO_WORKERS, cores - 1))
