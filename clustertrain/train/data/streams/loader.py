"""Batches from a stream, whose samples have no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from clustertrain.errors import CheckpointError, ConfigError
from clustertrain.train.data.loader import PADDING_POSITION, Loader
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.data.sample_reader import preserved_rng_states
from clustertrain.train.data.streams.source import StreamReader, StreamSource


class StreamLoader(Loader):
    """Endless iterator over this rank's part of each global batch of a stream.

    A position counts samples, and does not identify them. If the ranks open parts of the stream, the state of each
    rank belongs to :meth:`rank_state`. Otherwise every rank reads all samples, and rank 0's state is that of all.
    """

    def __init__(
        self,
        source: StreamSource,
        *,
        global_batch: int,
        micro_batch: int | None,
        seed: int,
        rank: int,
        ranks: int,
        device: torch.device,
        ragged: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """See :class:`Loader`; the rank reads the stream itself."""
        self.source = source
        self._reader = StreamReader(source, seed=seed, shard=rank if source.is_sharded else 0)
        self._last: tuple[int, Any] = (PADDING_POSITION, None)  # first sample of this step, with its position
        super().__init__(
            _StreamSamples(self),
            global_batch=global_batch,
            micro_batch=micro_batch,
            workers=0,
            seed=seed,
            rank=rank,
            ranks=ranks,
            device=device,
            ragged=ragged,
            limits=limits,
        )
        self._version = source.version

    def read(self, position: int) -> Any:
        """Return the sample at ``position``, which is not before the last one; or again the first of this step."""
        first, sample = self._last
        if position == first:
            return sample
        if not self.source.is_sharded:
            self._skip_to(position)
        sample = self._reader.read()
        if first < self.position:
            self._last = (position, sample)
        return sample

    def _skip_to(self, position: int) -> None:
        while self._reader.count < position:
            self._reader.read()

    def __next__(self) -> Any:
        item = super().__next__()
        if not self.source.is_sharded:  # rank 0's state is that of all, so all stop at the same sample
            with preserved_rng_states():
                self._skip_to(self.position)
        return item

    def _sample_pairs(self, position: int, skip: int, share: int) -> list[tuple[int, int]]:
        return [(p, p) for p in range(position + skip, position + skip + share)]

    def describe_batch(self, position: int, micro_batch: int = -1) -> str:
        """Return a text with the positions of the samples, which only say how many came before."""
        pairs, scope = self._select(position, micro_batch)
        return f"{scope}: samples {pairs[0][0]} to {pairs[-1][0]} of the stream, in the order of this run"

    def exclude(self, ranges: Sequence[Sequence[int]]) -> None:
        """Refuse: a stream cannot leave samples out by their position."""
        raise ConfigError(
            f"{self.source.name}: samples of a stream cannot be excluded after a rollback",
            fix="use map-style data, or turn rollback off in [stability]",
        )

    def close(self) -> None:
        """Do nothing: there are no workers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position and, unless the ranks open parts, the state of the stream."""
        state = {"position": self.position, "seed": self._seed, "version": self._version}
        if self.source.is_sharded:
            return {**state, "ranks": self._ranks}
        return {**state, "stream": self._reader.state_dict()}

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this rank's part of the stream."""
        return {"rank": self._rank, "ranks": self._ranks, "stream": self._reader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; of a part, :meth:`load_rank_state` follows.

        Raises:
            CheckpointError: the data is other data, or the ranks' parts were others.
        """
        self._check_version(state.get("version"))
        if ("stream" in state) == self.source.is_sharded or state.get("ranks", self._ranks) != self._ranks:
            then = f"{state['ranks']} parts" if "ranks" in state else "one stream for all ranks"
            now = f"{self._ranks} parts" if self.source.is_sharded else "one stream for all ranks"
            raise CheckpointError(
                f"{self.source.name}: the checkpoint was saved with {then}, and there are {now} now: a part of a "
                "stream can only be resumed by the rank that read it",
                fix="resume with as many data-parallel ranks, or start a new run",
            )
        self.position, self._seed = state["position"], state["seed"]
        self._iterator, self._last = None, (PADDING_POSITION, None)
        if not self.source.is_sharded:
            self._reader.load_state_dict(state["stream"])

    def load_rank_state(self, state: dict[str, Any] | None) -> None:
        """Continue with this rank's part of the stream.

        Raises:
            CheckpointError: ``state`` is not that of this data-parallel rank.
        """
        if state is None or (state["rank"], state["ranks"]) != (self._rank, self._ranks):
            raise CheckpointError(
                f"{self.source.name}: the checkpoint has no state of the part of data-parallel rank {self._rank} of "
                f"{self._ranks}",
                fix="resume with the same ranks and layout, or start a new run",
            )
        self._reader.load_state_dict(state["stream"])


class _StreamSamples:
    """The samples of a loader's stream by position, in ascending order only."""

    def __init__(self, loader: StreamLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return 1 << 62  # unknown; a pass without samples is an error when it is read

    def __getitem__(self, position: int) -> Any:
        return self._loader.read(position)
