"""Who saves, and what that is compared with. Each returns seconds, of the slowest rank:

stall    until training could go on
durable  until all bytes were on the disk, and committed where there is a commit

The peers run as their documentation shows them, with their defaults, but for the two that keep what they stage into.
What they leave in the page cache is written out when they are done, which counts for ``durable``, not for ``stall``.
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls torch.jit.script while it is imported
    from torchsnapshot import Snapshot, StateDict

from benchmarks.checkpoint_state import State, manager_of, places, rank_state
from benchmarks.rank_team import Team
from clustertrain import fsio
from clustertrain.checkpoint.manager import CheckpointManager

CHUNK_BYTES = 16 << 20
Took = dict[str, float]

CLONE, COPY, RAW_WRITE = "fresh clone", "copy", "raw write"
FIRST, LATER = "clustertrain, first", "clustertrain"
DCP, DCP_THREAD, DCP_KEPT = "dcp.save", "dcp.async_save", "dcp.async_save, stager kept"
DCP_PROCESS = "dcp.async_save, process, stager kept in shared memory"
TAKE, ASYNC_TAKE, TORCH_SAVE = "torchsnapshot.take", "torchsnapshot.async_take", "torch.save"
OF_DCP, OF_TORCHSNAPSHOT = "clustertrain, engine dcp", "clustertrain, engine torchsnapshot"


class Stopwatch:
    """Begins when all ranks have come."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._read: Took = {}
        team.meet()
        self._started = time.perf_counter()

    def lap(self, name: str) -> None:
        self._read[name] = time.perf_counter() - self._started

    def took(self) -> Took:
        """Collective."""
        return {name: self._team.slowest(s) for name, s in self._read.items()}


class Writers:
    """``room`` is memory for this rank's part, already there. What must be read later stays in ``place``."""

    def __init__(self, team: Team, state: State, room: torch.Tensor, *, shared: bool) -> None:
        """``shared``: there is room in /dev/shm for the peer that wants it."""
        self._team, self._state, self._room = team, state, room
        self._group, self._own = team.own_group(), team.own_group()
        # The order is that of a round: what is compared stands together, so that it meets the same disk.
        self.all: dict[str, Callable[[Path], dict[str, Took]]] = {
            CLONE: self._clone,
            COPY: self._copy,
            LATER: self._ours,
            RAW_WRITE: self._raw_write,
            OF_DCP: lambda place: self._other_engine(place, OF_DCP, "dcp"),
            OF_TORCHSNAPSHOT: lambda place: self._other_engine(place, OF_TORCHSNAPSHOT, "torchsnapshot"),
            DCP: self._dcp,
            DCP_THREAD: self._dcp_thread,
            DCP_KEPT: self._dcp_kept,
            TAKE: self._take,
            ASYNC_TAKE: self._async_take,
            TORCH_SAVE: self._torch_save,
        }
        if shared:
            self.all[DCP_PROCESS] = self._dcp_process

    # -- what it is compared with

    def _clone(self, place: Path) -> dict[str, Took]:
        """Into memory that the kernel gives out anew: what malloc was given back it may still have."""
        parts = self._state.locals()
        watch = Stopwatch(self._team)
        size = sum(p.numel() for p in parts)
        fresh = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _copy_into(torch.frombuffer(fresh, dtype=torch.uint8), parts)
        watch.lap("stall")
        return {CLONE: watch.took()}

    def _copy(self, place: Path) -> dict[str, Took]:
        parts = self._state.locals()
        watch = Stopwatch(self._team)
        _copy_into(self._room, parts)
        watch.lap("stall")
        return {COPY: watch.took()}

    def _raw_write(self, place: Path) -> dict[str, Took]:
        self._team.on_rank_0(place.mkdir)
        data = self._room.numpy().data
        watch = Stopwatch(self._team)
        fd = os.open(place / f"{self._team.rank}.bin", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            while data:
                data = data[os.write(fd, data[:CHUNK_BYTES]) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        watch.lap("durable")
        return {RAW_WRITE: watch.took()}

    # -- ours

    def _ours(self, place: Path) -> dict[str, Took]:
        manager, took = self._manager(place), {}
        for step, name in ((1, FIRST), (2, LATER)):
            took[name] = self._one_save(manager, step)
        self._team.on_rank_0(lambda: shutil.rmtree(place / "step-00000001"))
        manager.close()
        return took

    def _manager(self, place: Path, engine: str = "raw") -> CheckpointManager:
        """As the session has it some steps after the first: the process is there and so is the memory."""
        manager = manager_of(place, self._own, engine=engine)
        manager.start()
        before = set(threading.enumerate())
        manager.reserve(self._state.objects, rank_state())
        for thread in set(threading.enumerate()) - before:
            thread.join()
        return manager

    def _one_save(self, manager: CheckpointManager, step: int) -> Took:
        watch = Stopwatch(self._team)
        manager.save(step, self._state.objects, rank_state())
        watch.lap("stall")
        manager.wait_for_saves()
        watch.lap("durable")
        return watch.took()

    def _other_engine(self, place: Path, name: str, engine: str) -> dict[str, Took]:
        """After a save of next to nothing, so that the process has imported the library."""
        manager = self._manager(place, engine)
        manager.save(1, {"nothing": torch.zeros(1)}, rank_state(), wait=True)
        took = self._one_save(manager, 2)
        manager.close()
        return {name: took}

    # -- peers

    def _dcp(self, place: Path) -> dict[str, Took]:
        content = self._state.nested()
        watch = Stopwatch(self._team)
        dcp.save(content, checkpoint_id=place, process_group=self._group)
        watch.lap("stall")
        return {DCP: self._durable(watch, place)}

    def _dcp_thread(self, place: Path) -> dict[str, Took]:
        return {DCP_THREAD: self._dcp_async(place)}

    def _dcp_kept(self, place: Path) -> dict[str, Took]:
        with self._stager(shared=False) as stager:
            return {DCP_KEPT: self._dcp_async(place, async_stager=stager)}

    def _dcp_process(self, place: Path) -> dict[str, Took]:
        """Saves of next to nothing before, which starts its process, and after, when that lets go of the memory."""
        options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        with _silent():
            self._dcp_async(place / "before", {"nothing": torch.zeros(1)}, **options)
        with self._stager(shared=True) as stager:
            took = self._dcp_async(place / "it", async_stager=stager, **options)
        self._dcp_async(place / "after", {"nothing": torch.zeros(1)}, **options)
        return {DCP_PROCESS: took}

    @contextmanager
    def _stager(self, *, shared: bool) -> Iterator[DefaultStager]:
        """One that has staged the state before, as in a later save of a script that keeps it."""
        stager = DefaultStager(StagingOptions(False, shared, False, False))
        stager.stage(self._state.nested())
        yield stager
        stager.close()

    def _dcp_async(self, place: Path, content: dict[str, Any] | None = None, **options: Any) -> Took:
        content = content or self._state.nested()
        watch = Stopwatch(self._team)
        saving: Any = dcp.async_save(content, checkpoint_id=place, process_group=self._group, **options)
        watch.lap("stall")
        saving.result()
        return self._durable(watch, place)

    def _take(self, place: Path) -> dict[str, Took]:
        content = {"state": StateDict(**self._state.flat())}
        watch = Stopwatch(self._team)
        Snapshot.take(str(place), content, self._group)
        watch.lap("stall")
        return {TAKE: self._durable(watch, place)}

    def _async_take(self, place: Path) -> dict[str, Took]:
        content = {"state": StateDict(**self._state.flat())}
        watch = Stopwatch(self._team)
        pending = Snapshot.async_take(str(place), content, self._group)
        watch.lap("stall")
        pending.wait()
        return {ASYNC_TAKE: self._durable(watch, place)}

    def _torch_save(self, place: Path) -> dict[str, Took]:
        self._team.on_rank_0(place.mkdir)
        content = self._state.flat()
        watch = Stopwatch(self._team)
        torch.save(content, place / f"{self._team.rank}.pt")
        watch.lap("stall")
        return {TORCH_SAVE: self._durable(watch, place)}

    def _durable(self, watch: Stopwatch, place: Path) -> Took:
        """The ranks share the files out among them."""
        files = sorted(p for p in place.rglob("*") if p.is_file())
        for path in files[self._team.rank :: self._team.size]:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        fsio.fsync_folder(place)
        watch.lap("durable")
        return watch.took()


@contextmanager
def _silent() -> Iterator[None]:
    """A process started meanwhile prints nothing to stderr, ever: DCP's tells of each request."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _copy_into(room: torch.Tensor, parts: list[torch.Tensor]) -> None:
    for part, at in places(parts):
        room[at : at + part.numel()].copy_(part)
