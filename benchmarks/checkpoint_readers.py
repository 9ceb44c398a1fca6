"""Who restores, from files that are not in memory, into a state of its own; and a raw read. Each returns the seconds of
the slowest rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.checkpoint_state import Shapes, State, manager_of
from benchmarks.checkpoint_writers import CHUNK_BYTES, DCP, LATER, RAW_WRITE, TAKE, Snapshot, StateDict
from benchmarks.cold import make_cold
from benchmarks.measure import CannotRun
from benchmarks.rank_team import Team

RESTORE, RAW_READ = "clustertrain", "raw read"
OTHER_RANKS, OTHER_DIM = "clustertrain, saved by other ranks", "clustertrain, into Shard(1)"
DCP_LOAD, TS_RESTORE = "dcp.load", "torchsnapshot.restore"


class Readers:
    """Of what the writers have left in ``folder``, and of ``other``, a checkpoint of the same kind saved by another
    number of ranks."""

    def __init__(self, team: Team, shapes: Shapes, room: torch.Tensor, folder: Path, other: tuple[Path, int]) -> None:
        """``other`` with its content's fingerprint."""
        self._team, self._shapes, self._room, self._folder = team, shapes, room, folder
        self._other = other
        self._group, self._ours = team.own_group(), team.own_group()
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
            raise CannotRun("what was restored is not what was saved")

    def _raw_read(self, content: int) -> float:
        """Of as many bytes by as many processes, into memory that is already there."""
        self._cold(self._folder / RAW_WRITE)

        def read() -> None:
            left = self._room.numpy().data
            path = self._folder / RAW_WRITE / f"{self._team.rank}.bin"
            with path.open("rb", buffering=0) as file:
                while left:
                    left = left[file.readinto(left[:CHUNK_BYTES]) or len(left) :]

        return self._team.timed(read)[1]

    def _restore(self, root: Path, content: int, dim: int) -> float:
        """As at the start of a job: an optimizer that has no state yet."""
        state = State(self._shapes, dim=dim, filled=False, moments=False)
        manager = manager_of(root, self._ours)
        self._cold(root)
        _, seconds = self._team.timed(lambda: manager.restore(state.objects))
        self._check(state, content)
        manager.close()
        return seconds

    def _dcp_load(self, content: int) -> float:
        state = State(self._shapes, filled=False)
        into = state.nested()
        self._cold(self._folder / DCP)
        place = self._folder / DCP
        _, seconds = self._team.timed(lambda: dcp.load(into, checkpoint_id=place, process_group=self._group))
        self._check(state, content)
        return seconds

    def _torchsnapshot(self, content: int) -> float:
        state = State(self._shapes, filled=False)
        into = {"state": StateDict(**state.flat())}
        self._cold(self._folder / TAKE)
        snapshot = Snapshot(str(self._folder / TAKE), self._group)
        _, seconds = self._team.timed(lambda: snapshot.restore(into))
        self._check(state, content)
        return seconds
