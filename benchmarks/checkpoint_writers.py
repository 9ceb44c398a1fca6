"""The writers of the checkpoint benchmark: clustertrain, its peers, and plain copies and writes.

Each returns the seconds of the slowest rank:

stall    until training could continue
durable  until all bytes were on the disk, and committed if there is a commit

The peers run as documented, with their defaults, except the two that keep their staging memory. What they leave in the
page cache is flushed after they return, which counts for ``durable``, not for ``stall``.
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
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls torch.jit.script at import
    from torchsnapshot import Snapshot, StateDict

from benchmarks.checkpoint_state import State, make_manager, rank_state, with_offsets
from benchmarks.rank_team import Team
from clustertrain import fsio
from clustertrain.checkpoint.manager import CheckpointManager

CHUNK_BYTES = 16 << 20
Seconds = dict[str, float]

CLONE, COPY, RAW_WRITE = "fresh clone", "copy", "raw write"
FIRST, LATER = "clustertrain, first", "clustertrain"
DCP, DCP_THREAD, DCP_KEPT = "dcp.save", "dcp.async_save", "dcp.async_save, stager kept"
DCP_PROCESS = "dcp.async_save, process, stager kept in shared memory"
TAKE, ASYNC_TAKE, TORCH_SAVE = "torchsnapshot.take", "torchsnapshot.async_take", "torch.save"
FROZEN, FROZEN_LATER = "clustertrain, all frozen, first", "clustertrain, all frozen"
OF_DCP, OF_TORCHSNAPSHOT = "clustertrain, engine dcp", "clustertrain, engine torchsnapshot"


class Stopwatch:
    """A stopwatch that starts when all ranks have arrived."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._laps: Seconds = {}
        team.barrier()
        self._started = time.perf_counter()

    def lap(self, name: str) -> None:
        self._laps[name] = time.perf_counter() - self._started

    def slowest_laps(self) -> Seconds:
        """Return the laps of the slowest rank. Collective."""
        return {name: self._team.slowest(s) for name, s in self._laps.items()}


class Writers:
    """All writers, by name. Each saves into a folder, where the files stay for the readers."""

    def __init__(self, team: Team, state: State, buffer: torch.Tensor, *, shared: bool) -> None:
        """``buffer``: allocated memory for this rank's part. ``shared``: /dev/shm is large enough for the peer that
        uses it."""
        self._team, self._state, self._buffer = team, state, buffer
        self._group, self._own = team.new_group(), team.new_control_group()
        # In the order of a round: what is compared is adjacent, so that the disk is equally fast for both.
        self.all: dict[str, Callable[[Path], dict[str, Seconds]]] = {
            CLONE: self._clone,
            COPY: self._copy,
            LATER: self._ours,
            RAW_WRITE: self._raw_write,
            FROZEN: self._frozen,
            OF_DCP: lambda folder: self._other_engine(folder, OF_DCP, "dcp"),
            OF_TORCHSNAPSHOT: lambda folder: self._other_engine(folder, OF_TORCHSNAPSHOT, "torchsnapshot"),
            DCP: self._dcp,
            DCP_THREAD: self._dcp_thread,
            DCP_KEPT: self._dcp_kept,
            TAKE: self._take,
            ASYNC_TAKE: self._async_take,
            TORCH_SAVE: self._torch_save,
        }
        if shared:
            self.all[DCP_PROCESS] = self._dcp_process

    # -- baselines

    def _clone(self, folder: Path) -> dict[str, Seconds]:
        """Copy into new memory from the kernel: malloc may still have memory that was freed."""
        parts = self._state.locals()
        watch = Stopwatch(self._team)
        size = sum(p.numel() for p in parts)
        fresh = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _copy_into(torch.frombuffer(fresh, dtype=torch.uint8), parts)
        watch.lap("stall")
        return {CLONE: watch.slowest_laps()}

    def _copy(self, folder: Path) -> dict[str, Seconds]:
        parts = self._state.locals()
        watch = Stopwatch(self._team)
        _copy_into(self._buffer, parts)
        watch.lap("stall")
        return {COPY: watch.slowest_laps()}

    def _raw_write(self, folder: Path) -> dict[str, Seconds]:
        self._team.on_rank_0(folder.mkdir)
        data = self._buffer.numpy().data
        watch = Stopwatch(self._team)
        fd = os.open(folder / f"{self._team.rank}.bin", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            while data:
                data = data[os.write(fd, data[:CHUNK_BYTES]) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        watch.lap("durable")
        return {RAW_WRITE: watch.slowest_laps()}

    # -- ours

    def _ours(self, folder: Path) -> dict[str, Seconds]:
        manager, seconds = self._manager(folder), {}
        for step, name in ((1, FIRST), (2, LATER)):
            seconds[name] = self._one_save(manager, step)
        self._team.on_rank_0(lambda: shutil.rmtree(folder / "step-00000001"))
        manager.close()
        return seconds

    def _frozen(self, folder: Path) -> dict[str, Seconds]:
        """Save as many bytes, all of which are frozen parameters: the later save links them."""
        tensors = [t for group in self._state.nested().values() for t in group.values()]
        frozen = nn.ParameterList([nn.Parameter(t, requires_grad=False) for t in tensors if t.is_floating_point()])
        objects = {"base": frozen, "trained": {"steps": torch.zeros(1)}}
        manager = self._manager(folder, objects=objects)
        seconds = {name: self._one_save(manager, step, objects) for step, name in ((1, FROZEN), (2, FROZEN_LATER))}
        manager.close()
        return seconds

    def _manager(self, folder: Path, engine: str = "raw", objects: dict[str, Any] | None = None) -> CheckpointManager:
        """Return a manager as in a session some steps after the first: with its process and its memory."""
        manager = make_manager(folder, self._own, engine=engine)
        manager.start()
        before = set(threading.enumerate())
        manager.reserve(objects or self._state.objects, rank_state())
        for thread in set(threading.enumerate()) - before:
            thread.join()
        return manager

    def _one_save(self, manager: CheckpointManager, step: int, objects: dict[str, Any] | None = None) -> Seconds:
        watch = Stopwatch(self._team)
        manager.save(step, objects or self._state.objects, rank_state())
        watch.lap("stall")
        manager.wait_for_saves()
        watch.lap("durable")
        return watch.slowest_laps()

    def _other_engine(self, folder: Path, name: str, engine: str) -> dict[str, Seconds]:
        """After a save of next to nothing, so that the process has imported the library."""
        manager = self._manager(folder, engine)
        manager.save(1, {"nothing": torch.zeros(1)}, rank_state(), wait=True)
        seconds = self._one_save(manager, 2)
        manager.close()
        return {name: seconds}

    # -- peers

    def _dcp(self, folder: Path) -> dict[str, Seconds]:
        content = self._state.nested()
        watch = Stopwatch(self._team)
        dcp.save(content, checkpoint_id=folder, process_group=self._group)
        watch.lap("stall")
        return {DCP: self._durable(watch, folder)}

    def _dcp_thread(self, folder: Path) -> dict[str, Seconds]:
        return {DCP_THREAD: self._dcp_async(folder)}

    def _dcp_kept(self, folder: Path) -> dict[str, Seconds]:
        with self._stager(shared=False) as stager:
            return {DCP_KEPT: self._dcp_async(folder, async_stager=stager)}

    def _dcp_process(self, folder: Path) -> dict[str, Seconds]:
        """Save with DCP's process. A tiny save before it starts the process, and one after it frees the memory."""
        options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        with _silent():
            self._dcp_async(folder / "before", {"nothing": torch.zeros(1)}, **options)
        with self._stager(shared=True) as stager:
            seconds = self._dcp_async(folder / "it", async_stager=stager, **options)
        self._dcp_async(folder / "after", {"nothing": torch.zeros(1)}, **options)
        return {DCP_PROCESS: seconds}

    @contextmanager
    def _stager(self, *, shared: bool) -> Iterator[DefaultStager]:
        """Yield a stager that has staged the state before, as in a later save of a script that keeps its stager."""
        stager = DefaultStager(StagingOptions(False, shared, False, False))
        stager.stage(self._state.nested())
        yield stager
        stager.close()

    def _dcp_async(self, folder: Path, content: dict[str, Any] | None = None, **options: Any) -> Seconds:
        content = content or self._state.nested()
        watch = Stopwatch(self._team)
        saving: Any = dcp.async_save(content, checkpoint_id=folder, process_group=self._group, **options)
        watch.lap("stall")
        saving.result()
        return self._durable(watch, folder)

    def _take(self, folder: Path) -> dict[str, Seconds]:
        content = {"state": StateDict(**self._state.flat())}
        watch = Stopwatch(self._team)
        Snapshot.take(str(folder), content, self._group)
        watch.lap("stall")
        return {TAKE: self._durable(watch, folder)}

    def _async_take(self, folder: Path) -> dict[str, Seconds]:
        content = {"state": StateDict(**self._state.flat())}
        watch = Stopwatch(self._team)
        pending = Snapshot.async_take(str(folder), content, self._group)
        watch.lap("stall")
        pending.wait()
        return {ASYNC_TAKE: self._durable(watch, folder)}

    def _torch_save(self, folder: Path) -> dict[str, Seconds]:
        self._team.on_rank_0(folder.mkdir)
        content = self._state.flat()
        watch = Stopwatch(self._team)
        torch.save(content, folder / f"{self._team.rank}.pt")
        watch.lap("stall")
        return {TORCH_SAVE: self._durable(watch, folder)}

    def _durable(self, watch: Stopwatch, folder: Path) -> Seconds:
        """Flush the files, divided among the ranks, and return the laps."""
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        for path in files[self._team.rank :: self._team.size]:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        fsio.fsync_folder(folder)
        watch.lap("durable")
        return watch.slowest_laps()


@contextmanager
def _silent() -> Iterator[None]:
    """Start processes without stderr in this context: DCP's prints every request."""
    stderr = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as devnull:
            os.dup2(devnull.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _copy_into(buffer: torch.Tensor, parts: list[torch.Tensor]) -> None:
    for part, offset in with_offsets(parts):
        buffer[offset : offset + part.numel()].copy_(part)
