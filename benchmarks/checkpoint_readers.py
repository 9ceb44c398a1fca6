"""The readers of the checkpoint benchmark: restores from files that are not in memory, and a raw read.

Each returns the seconds of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.checkpoint_state import Shapes, State, make_manager
from benchmarks.checkpoint_writers import CHUNK_BYTES, DCP, LATER, RAW_WRITE, TAKE, Snapshot, StateDict
from benchmarks.cold import make_cold
from benchmarks.measure import CannotRun
from benchmarks.rank_team import Team

RESTORE, RAW_READ = "clustertrain", "raw read"
OTHER_RANKS, OTHER_DIM = "clustertrain, saved by other ranks", "clustertrain, into Shard(1)"
DCP_LOAD, TS_RESTORE = "dcp.load", "torchsnapshot.restore"


class Readers:
    """All readers, by name. They read what the writers have left in ``folder``."""

    def __init__(self, team: Team, shapes: Shapes, buffer: torch.Tensor, folder: Path, other: tuple[Path, int]) -> None:
        """``other``: the same kind of checkpoint, saved by another number of ranks, and its fingerprint."""
        self._team, self._shapes, self._buffer, self._folder = team, shapes, buffer, folder
        self._other = other
        self._group, self._ours = team.new_group(), team.new_control_group()
        self.all: dict[str, Callable[[int], float]] = {
            RAW_READ: self._raw_read,
            RESTORE: lambda content: self._restore(folder / LATER, content, 0),
            OTHER_RANKS: lambda content: self._restore(other[0], other[1], 0),
            OTHER_DIM: lambda content: self._restore(folder / LATER, content, 1),
            DCP_LOAD: self._dcp_load,
            TS_RESTORE: self._torchsnapshot,
        }

    def _cold(self, folder: Path) -> None:
        self._team.on_rank_0(lambda: make_cold(folder))

    def _check(self, state: State, content: int) -> None:
        if state.fingerprint() != content:
            raise CannotRun("the restored state differs from the saved one")

    def _raw_read(self, content: int) -> float:
        """Read as many bytes with as many processes, into existing memory."""
        self._cold(self._folder / RAW_WRITE)

        def read() -> None:
            rest = self._buffer.numpy().data
            path = self._folder / RAW_WRITE / f"{self._team.rank}.bin"
            with path.open("rb", buffering=0) as file:
                while rest:
                    rest = rest[file.readinto(rest[:CHUNK_BYTES]) or len(rest) :]

        return self._team.time(read)[1]

    def _restore(self, root: Path, content: int, dim: int) -> float:
        """Restore as at the start of a job, when the optimizer has no state yet."""
        state = State(self._shapes, dim=dim, filled=False, moments=False)
        manager = make_manager(root, self._ours)
        self._cold(root)
        _, seconds = self._team.time(lambda: manager.restore(state.objects))
        self._check(state, content)
        manager.close()
        return seconds

    def _dcp_load(self, content: int) -> float:
        state = State(self._shapes, filled=False)
        target = state.nested()
        self._cold(self._folder / DCP)
        folder = self._folder / DCP
        _, seconds = self._team.time(lambda: dcp.load(target, checkpoint_id=folder, process_group=self._group))
        self._check(state, content)
        return seconds

    def _torchsnapshot(self, content: int) -> float:
        state = State(self._shapes, filled=False)
        target = {"state": StateDict(**state.flat())}
        self._cold(self._folder / TAKE)
        snapshot = Snapshot(str(self._folder / TAKE), self._group)
        _, seconds = self._team.time(lambda: snapshot.restore(target))
        self._check(state, content)
        return seconds
