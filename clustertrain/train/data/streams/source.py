"""Data that can only be iterated, with a position of its own instead of sample numbers.

A stream that has ``state_dict`` and ``load_state_dict``, as those of torchdata and of `datasets`, resumes from its own
state. Any other stream is read again up to the sample at which the run stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from clustertrain.checkpoint.core.state_dict import is_stateful
from clustertrain.errors import CheckpointError, ConfigError
from clustertrain.train.core.seeds import derive_seed
from clustertrain.train.data.sample_reader import MapStyleDataset, preserved_rng_states, seed_generators

MAX_HEAD = 1024  # samples that stand for a stream where samples are chosen by number


@dataclass(frozen=True)
class StreamSource:
    """A stream that a recipe's entry opens."""

    open: Callable[[], Iterable[Any]]
    """Returns the stream from its start, as a new object."""
    name: str
    """Key and value of the entry, for messages."""
    version: str
    """Identifies the data; a resume with another version is refused."""
    is_sharded: bool
    """Each data-parallel rank opens its own part. Otherwise all open the same stream, and each keeps its share."""
    has_state: bool
    """The stream saves and loads its own state."""

    def head(self, count: int = MAX_HEAD) -> list[Any]:
        """Return the first samples, at most ``count``."""
        with preserved_rng_states():
            stream = StreamReader(self, seed=0, shard=0)
            return stream.read_first(count)

    def describe(self) -> str:
        """Return how the ranks read the stream and how it resumes, as a sentence."""
        reading = (
            "each rank reads its own part" if self.is_sharded else "each rank reads all samples and keeps its share"
        )
        if not self.has_state:
            resume = "a resume reads it again up to where the run stopped, which is exact only if the order is fixed"
        else:
            resume = "a resume restores the stream's own state, and is only as exact as that state"
        limit = "; it needs the same number of data-parallel ranks" if self.is_sharded else ""
        return f"samples come from a stream, not by position: {reading}; {resume}{limit}"


def as_map_style(dataset: MapStyleDataset | StreamSource) -> MapStyleDataset:
    """Return ``dataset``, or the first samples of a stream."""
    return dataset.head() if isinstance(dataset, StreamSource) else dataset


class StreamReader:
    """The samples of a stream, pass after pass, with freshly seeded generators for each.

    The generators are seeded by the number of the sample, so that random changes in the stream do not depend on
    interruptions.
    """

    def __init__(self, source: StreamSource, *, seed: int, shard: int) -> None:
        """``shard`` is the data-parallel rank of a sharded stream, otherwise 0."""
        self._source = source
        self._seed, self._shard = seed, shard
        self._stream: Any = None
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._taken = 0  # samples of this pass
        self._is_restored = False  # the pass began in its middle
        self.count = 0
        """Samples read so far, in all passes."""

    def read_first(self, count: int) -> list[Any]:
        """Return the first samples of this pass, at most ``count``."""
        samples: list[Any] = []
        with suppress(StopIteration):
            while len(samples) < count:
                samples.append(self._next_in_pass())
        return samples

    def read(self) -> Any:
        """Return the next sample.

        Raises:
            ConfigError: a whole pass had none.
        """
        while True:
            try:
                return self._next_in_pass()
            except StopIteration:
                self._end_pass()

    def _next_in_pass(self) -> Any:
        if self._iterator is None:
            self._iterator = self._begin_pass()
        seed_generators(derive_seed(self._seed, "stream", self._shard, self.count))
        sample = next(self._iterator)
        self._taken += 1
        self.count += 1
        return sample

    def _begin_pass(self) -> Iterator[Any]:
        # The stream may draw its order when it is opened or iterated: it must be the same on all ranks and in a resume.
        seed_generators(derive_seed(self._seed, "pass", self._shard, self._epoch))
        if self._stream is None:
            self._stream = self._source.open()
        set_epoch = getattr(self._stream, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        return iter(self._stream)

    def _end_pass(self) -> None:
        if not self._taken:
            part = f"the part of data-parallel rank {self._shard}" if self._source.is_sharded else "the stream"
            raise ConfigError(
                f"{self._source.name}: {part} has no samples",
                fix="yield samples in each pass" + (", from at least one file per rank" * self._source.is_sharded),
            )
        # An iterator is used up, and a stream of `datasets` starts each further pass at the state that was loaded.
        if self._iterator is self._stream or self._is_restored:
            self._stream, self._is_restored = None, False
        self._iterator = None
        self._epoch, self._taken = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the stream's own state if it has one."""
        state: dict[str, Any] = {"epoch": self._epoch, "taken": self._taken, "count": self.count}
        if self._source.has_state and self._iterator is not None:
            state["stream"] = self._stream.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Without a state of the stream's own, read its pass again up to there."""
        with preserved_rng_states():
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        self._stream, self._iterator = None, None
        self._epoch, self._taken, self.count = state["epoch"], 0, state["count"] - state["taken"]
        if "stream" in state and self._source.has_state:
            self._stream = self._source.open()
            self._stream.load_state_dict(state["stream"])
            self._is_restored = True
            self._iterator = self._begin_pass()
            self._taken, self.count = state["taken"], state["count"]
        else:
            for _ in range(state["taken"]):
                self._skip()

    def _skip(self) -> None:
        try:
            self._next_in_pass()
        except StopIteration as e:
            raise CheckpointError(
                f"{self._source.name}: pass {self._epoch + 1} has {self._taken} samples, fewer than the checkpoint's",
                fix="stream the same data, or start a new run",
            ) from e


def open_source(
    stream: Iterable[Any], reopen: Callable[[], Iterable[Any]], name: str, version: str, *, is_sharded: bool
) -> StreamSource:
    """Return the source of ``stream``, which the entry has just opened; ``reopen`` opens it again."""
    first = [stream]
    return StreamSource(
        open=lambda: first.pop() if first else reopen(),
        name=name,
        version=version,
        is_sharded=is_sharded,
        has_state=is_stateful(stream),
    )
