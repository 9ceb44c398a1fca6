"""The copy of a rank's state that a save begins with: in memory that another process can read too."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from clustertrain.checkpoint.core.state_dict import LocalShard
from clustertrain.checkpoint.format import direct_io
from clustertrain.checkpoint.format.staged_segments import Segment

_ALIGN = 64  # bytes; no element is larger
_LARGE_BYTES = 1 << 20
_MAX_FREE_FRACTION = 0.8  # of the memory that is free may be taken; the rest is for what the next step needs
_GRANULARITY = 1 << 20
_MADV_POPULATE_WRITE = 23  # of madvise, Linux 5.14 and newer
_POPULATE_BYTES = 64 << 20  # in one call, which holds the lock of this process's memory map


class StagingBuffer:
    """One buffer: nothing is in it while its bytes are being written. It grows to the largest save and stays: the
    kernel has to find and clear each page of new memory, which takes up to ten times as long as the copy itself.
    :meth:`reserve` has that done ahead of the first save, beside the training.

    It is an anonymous file in memory and not one in /dev/shm, which many containers have 64 MiB of and where a killed
    process leaves its files behind. Where so much memory is not free, it is a file without a name in ``spill``.
    """

    def __init__(self, spill_dir: Path, device: torch.device, buffers_per_node: int = 1) -> None:
        """``buffers_per_node``: how many buffers of all ranks of the machine want the memory that is free."""
        self._spill_dir = spill_dir
        self._buffers_per_node = buffers_per_node
        self._device = device
        self._pinned = False
        self._reserve_thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._buffer: torch.Tensor | None = None
        self.fd: int | None = None
        self.generation = 0  # of the memory: a new one may have the number of the old one's file descriptor
        self.size = 0
        self.in_memory = True

    def stage(self, shards: Sequence[LocalShard]) -> list[Segment]:
        """Copy ``shards``; on a GPU that is under way when it returns, see :meth:`synchronize`.

        Raises:
            OSError: neither memory nor disk has the room.
        """
        segments, total = _layout_segments(shards)
        self._join_reserve()
        if self._grow_to(total):
            self._pin()
        if self._device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._copy_shards(shards, segments)
            # What comes next in the step may overwrite what is being copied. The device waits, the host does not.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        else:
            self._copy_shards(shards, segments)
        return segments

    @property
    def is_async(self) -> bool:
        """Whether :meth:`synchronize` may have to wait."""
        return self._stream is not None

    def synchronize(self) -> None:
        """Wait until all bytes have arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy_shards(self, shards: Sequence[LocalShard], segments: Sequence[Segment]) -> None:
        assert self._buffer is not None or not shards
        for shard, segment in zip(shards, segments, strict=True):
            if segment.nbytes and self._buffer is not None:
                target = self._buffer[segment.buffer_offset : segment.buffer_offset + segment.nbytes].view(
                    shard.local_tensor.dtype
                )
                local = shard.local_tensor.detach().resolve_conj().resolve_neg()
                target.view(shard.local_tensor.shape).copy_(local, non_blocking=self._pinned)

    def reserve(self, shards: Sequence[LocalShard]) -> None:
        """Begin to make room for ``shards``; does not wait.

        Raises:
            OSError: as :meth:`stage`.
        """
        self._join_reserve()
        if self._grow_to(_layout_segments(shards)[1]):
            self._reserve_thread = threading.Thread(target=self._populate)
            self._reserve_thread.start()

    def _join_reserve(self) -> None:
        if self._reserve_thread is not None:
            self._reserve_thread.join()
            self._reserve_thread = None

    def _populate(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread, which would have a context on the first GPU else
        if self.in_memory and self._buffer is not None:
            madvise = getattr(ctypes.CDLL(None), "madvise", None)
            for pos in range(0, self.size, _POPULATE_BYTES):
                length = min(_POPULATE_BYTES, self.size - pos)
                address = ctypes.c_void_p(self._buffer.data_ptr() + pos)
                if madvise is None or madvise(address, ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                    break  # an older kernel: the first save does it
        self._pin()

    def _pin(self) -> None:
        """Without it copies from a GPU go through a small buffer of the driver's, and wait for each other."""
        if self._device.type == "cuda" and self.in_memory and self._buffer is not None:
            self._pinned = _cudart().cudaHostRegister(self._buffer.data_ptr(), self.size, 0) == 0

    def _grow_to(self, total: int) -> bool:
        """Whether there is new memory."""
        total = -(-max(total, 1) // _GRANULARITY) * _GRANULARITY
        if total <= self.size:
            return False
        self.close()
        self.in_memory = total <= _MAX_FREE_FRACTION * available_memory() / self._buffers_per_node
        try:
            if self.in_memory and hasattr(os, "memfd_create"):
                self.fd = os.memfd_create("clustertrain-staging")
                os.truncate(self.fd, total)
            else:
                with tempfile.TemporaryFile(dir=self._spill_dir) as file:
                    self.fd = os.dup(file.fileno())
                # Not sparse: where the disk is full, that is told now, and not by SIGBUS in the middle of the copy.
                os.posix_fallocate(self.fd, 0, total)
            self._buffer = torch.frombuffer(mmap.mmap(self.fd, total), dtype=torch.uint8)
        except BaseException:
            self.close()
            raise
        self.size = total
        self.generation += 1
        return True

    def memory(self) -> memoryview:
        """All of it, for the process that writes in its own."""
        assert self._buffer is not None
        return self._buffer.numpy().data

    def close(self) -> None:
        self._join_reserve()
        self.synchronize()  # a copy may be under way that nobody wants any more
        if self._pinned and self._buffer is not None:
            _cudart().cudaHostUnregister(self._buffer.data_ptr())
        self._pinned = False
        self._buffer = None
        if self.fd is not None:
            os.close(self.fd)
        self.fd, self.size = None, 0


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _layout_segments(shards: Sequence[LocalShard]) -> tuple[list[Segment], int]:
    """Where each block goes, and how many bytes that takes."""
    segments, offset = [], 0
    for shard in shards:
        nbytes = shard.local_tensor.numel() * shard.local_tensor.element_size()
        # A file has them at the same places, where reading a large one does not begin in the middle of a page.
        align = _ALIGN if nbytes < _LARGE_BYTES else direct_io.ALIGN
        offset = -(-offset // align) * align
        segments.append(
            Segment(
                name=shard.name,
                kind=shard.kind,
                dtype=str(shard.local_tensor.dtype).removeprefix("torch."),
                itemsize=shard.local_tensor.element_size(),
                shape=shard.shape,
                start=shard.start,
                chunk_shape=tuple(shard.local_tensor.shape),
                buffer_offset=offset,
                nbytes=nbytes,
            )
        )
        offset += nbytes
    return segments, offset


def available_memory() -> int:
    """Bytes that may still be allocated: of the machine, and of the cgroup (version 2) that the job is confined to."""
    available = int(psutil.virtual_memory().available)
    for folder in _list_own_cgroups():
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                # The page cache counts as used and goes when memory is wanted.
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
                available = min(available, int(limit) - used)
        except (OSError, ValueError):
            continue
    return max(0, available)


def _list_own_cgroups() -> list[Path]:
    """This process's cgroup and those above it, whose limits hold too."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    cgroup_path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if cgroup_path is None:
        return []
    folder = root / cgroup_path.lstrip("/")
    return [folder, *(p for p in folder.parents if p.is_relative_to(root))]
