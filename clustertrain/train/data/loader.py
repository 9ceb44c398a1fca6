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
from clustertrain.config.data import READERS
from clustertrain.errors import CheckpointError, ConfigError, EnvironmentNotFit
from clustertrain.plan import batch as batches
from clustertrain.train.core import step_timer
from clustertrain.train.core.seeds import derive
from clustertrain.train.core.stop import SIGNALS
from clustertrain.train.data import permutation
from clustertrain.train.data.prefetch import ToDevice
from clustertrain.train.data.sample_checks import Check, Limits, listed
from clustertrain.train.data.sample_reader import Key, MapStyle, Reader, Refused

__all__ = ["Loader", "MapStyle", "workers_for"]

# A socket's path has at most 107 bytes (Linux, unix(7)), and multiprocessing adds "/pymp-xxxxxxxx/listener-xxxxxxxx".
LONGEST_TMPDIR = 107 - 32
_NOBODYS = -1  # the place of a sample that fills a micro-batch and counts for nothing


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
    (``ragged``), micro-batches differ in size, and a rank that has run out of samples gets its first one once more,
    with place -1: it counts for nothing.
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
        self.taken = 0  # samples that all ranks together have taken in this session
        self._left_out = permutation.LeftOut()
        self.wait_s = 0.0  # spent waiting for data since the session last asked
        self._dataset = dataset
        version = getattr(dataset, "version", None)
        self._version = version if isinstance(version, str) else None
        if not ragged:
            batches.check_divides(global_batch, ranks, micro_batch)
        self._rank, self._ranks = rank, ranks
        largest = batches.share_of(global_batch, ranks, 0)[1]
        self._micro = self.micro_batch = micro_batch or largest
        self._rounds = -(-largest // self._micro)
        self._as_list = micro_batch is not None
        self.ragged = global_batch % (ranks * self._micro) != 0
        self.latest: Any = None
        self.fresh = False
        self.places: list[torch.Tensor] = []
        self._workers = workers
        self._prefetch = prefetch
        self._seed = seed
        self._device = device
        self._limits = limits or Limits()
        self._to_device = ToDevice(device)
        self._iterator: Iterator[Any] | None = None
        self._closing: Any = None

    def micro_batches_at(self, position: int, rank: int | None = None) -> list[list[tuple[int, int]]]:
        """The (sample, position) pairs of this rank, or another one, of the global batch that starts at ``position``,
        by micro-batch."""
        first, share = batches.share_of(self.global_batch, self._ranks, self._rank if rank is None else rank)
        pairs = self._pairs(position, first, share)
        parts = [pairs[i * self._micro : (i + 1) * self._micro] for i in range(self._rounds)]
        # The rank's own sample: one that is not finite makes no step bad in whose global batch it is not.
        return [part or [(pairs[0][0], _NOBODYS)] for part in parts]

    def _pairs(self, position: int, ahead: int, share: int) -> list[tuple[int, int]]:
        """``share`` (sample, position) pairs of the global batch at ``position``, after the first ``ahead``."""
        pairs: list[tuple[int, int]] = []
        for first, count in self._left_out.runs(position, ahead + share):
            skipped = min(ahead, count)
            ahead, first, count = ahead - skipped, first + skipped, count - skipped  # noqa: PLW2901
            found = permutation.samples(self._seed, len(self._dataset), first, count)
            pairs += [(sample, first + i) for i, sample in enumerate(found)]
        return pairs

    def named(self, position: int, micro_batch: int = -1) -> str:
        """The samples of the global batch that started at ``position``, in words; with the number of a ``micro_batch``,
        counted over all data-parallel ranks, those of it alone."""
        if micro_batch < 0:
            pairs, whose = self._pairs(position, 0, self.global_batch), "the global batch"
        else:
            rank, part = divmod(micro_batch, self._rounds)
            pairs = self.micro_batches_at(position, rank)[part]
            whose = f"micro-batch {part} of data-parallel rank {rank}"
        first, last = (divmod(pairs[i][1], len(self._dataset))[0] for i in (0, -1))
        epochs = f"epoch {first}" if first == last else f"epochs {first} and {last}"
        return f"{whose}, {epochs}: {listed(self._dataset, [sample for sample, _ in pairs])}"

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
            with step_timer.part("data"):
                batch = settled(next(self._iterator))
            with step_timer.part("host_to_device"):
                parts.append(self._to_device(batch))
        self.places = [torch.tensor([p for _, p in keys]) for keys in self.micro_batches_at(self.position)]
        self.position = self.after(self.position)
        self.taken += self.global_batch
        self.wait_s += clock.monotonic() - started
        self.latest = parts if self._as_list else parts[0]
        self.fresh = True
        return self.latest

    def _start(self) -> Iterator[Any]:
        begins = self.position == 0 and not self._left_out.ranges
        reader = Reader(self._dataset, self._seed, Check(self._limits, finite=begins))
        if self._workers == 0:
            # Without DataLoader: its iterator draws from torch's global generator, so a resume would draw once more.
            return (reader.read(keys) for keys in _Positions(self, self.position))
        seed, positions = derive(self._seed, "workers"), _Positions(self, self.position)
        found, self._closing = read_ahead(reader, positions, self._workers, self._device, seed, self._prefetch)
        return found

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
        self._left_out = permutation.LeftOut(state.get("left_out", ()))


def read_ahead(
    reader: Reader, batches: Iterable[list[Key]], workers: int, device: torch.device, seed: int, prefetch: int
) -> tuple[Iterator[Any], Any]:
    """Micro-batches that processes of their own read, each ``prefetch`` of them ahead, to be :func:`settled`; and a
    shared value: set it to 1 before the iterator is dropped, and the workers may be ended."""
    _check_sockets()
    closing = multiprocessing.get_context().Value("b", 0, lock=False)
    loader = DataLoader(
        reader,
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=prefetch,
        collate_fn=_as_it_is,  # the reader has put it together
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


def _check_sockets() -> None:
    """Raises EnvironmentNotFit where the workers could not hand over a single batch, and the rank would wait for ever:
    Python only writes into the log that their sockets' path is too long."""
    there = tempfile.gettempdir()
    if len(os.fsencode(there)) > LONGEST_TMPDIR:
        raise EnvironmentNotFit(
            f"TMPDIR = {there!r} is too long for the sockets of data workers, {len(there)} characters",
            fix=f"set TMPDIR to a path of at most {LONGEST_TMPDIR}, or data.workers = 0",
        )


def settled(batch: Any) -> Any:
    """What a reader gave, with a list as a tuple: torch makes lists of tuples, and a list is one of micro-batches here.

    Raises:
        ConfigError: what a worker found wrong.
    """
    if isinstance(batch, Refused):
        raise ConfigError(batch.message, fix=batch.fix)
    return tuple(batch) if isinstance(batch, list) else batch


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


def _as_it_is(batch: Any) -> Any:
    return batch


def workers_for(asked: int, device: torch.device, cores: int) -> int:
    """How many workers a rank gets that has ``cores``; ``asked`` is ``data.workers``. -1 leaves one core to the rank
    itself, and on the CPU, where they compute, all."""
    if asked >= 0:
        return asked
    return 0 if device.type == "cpu" else max(1, min(READERS, cores - 1))
