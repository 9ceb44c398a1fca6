"""Staging buffers: a rank's state, copied into memory that its writer process shares."""

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
from clustertrain.checkpoint.format.staged_segments import MIN_FROZEN_BYTES, Segment

_ALIGN = 64  # bytes; no element is larger
_LARGE_BYTES = 1 << 20
_MAX_FREE_FRACTION = 0.8  # of the free memory; the rest is for the next training step
_GRANULARITY = 1 << 20
_MADV_POPULATE_WRITE = 23  # of madvise, Linux 5.14 and newer
_POPULATE_BYTES = 64 << 20  # per call, which holds the lock of this process's memory map


class StagingBuffer:
    """A buffer for one save at a time.

    It grows to the largest save and is kept, because the kernel must find and clear each page of new memory, which
    takes up to ten times as long as the copy. :meth:`reserve` does that ahead of the first save, during training.

    It is an anonymous memory file. /dev/shm has only 64 MiB in many containers, and a killed process leaves its files
    there. If too little memory is free, the buffer is an unnamed file in ``spill_dir``.
    """

    def __init__(self, spill_dir: Path, device: torch.device, buffers_per_node: int = 1) -> None:
        """
        Args:
            spill_dir: folder of the file that replaces memory.
            device: device of the state.
            buffers_per_node: staging buffers of all ranks on the machine, which share its free memory.
        """
        self._spill_dir = spill_dir
        self._buffers_per_node = buffers_per_node
        self._device = device
        self._pinned = False
        self._reserve_thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._buffer: torch.Tensor | None = None
        self.fd: int | None = None
        self.generation = 0  # of the memory, because new memory may get the same file descriptor number
        self.size = 0
        self.in_memory = True

    def stage(self, shards: Sequence[LocalShard]) -> list[Segment]:
        """Copy ``shards`` into the buffer. From a GPU the copy is in flight on return; see :meth:`synchronize`.

        Raises:
            OSError: neither memory nor disk has enough space.
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
            # The next kernels of the step may overwrite the source, so the device waits for the copy, but not the host.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        else:
            self._copy_shards(shards, segments)
        return segments

    @property
    def is_async(self) -> bool:
        """Return whether :meth:`synchronize` may have to wait."""
        return self._stream is not None

    def synchronize(self) -> None:
        """Wait for the copy from the GPU."""
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
        """Start to allocate memory for ``shards``, without waiting.

        Raises:
            OSError: see :meth:`stage`.
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
            torch.cuda.set_device(self._device)  # otherwise this thread creates a context on GPU 0
        if self.in_memory and self._buffer is not None:
            madvise = getattr(ctypes.CDLL(None), "madvise", None)
            for pos in range(0, self.size, _POPULATE_BYTES):
                length = min(_POPULATE_BYTES, self.size - pos)
                address = ctypes.c_void_p(self._buffer.data_ptr() + pos)
                if madvise is None or madvise(address, ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                    break  # an older kernel: the first save populates the pages
        self._pin()

    def _pin(self) -> None:
        """Pin the memory. Without it, copies from a GPU go through a small buffer of the driver and are serialized."""
        if self._device.type == "cuda" and self.in_memory and self._buffer is not None:
            self._pinned = _cudart().cudaHostRegister(self._buffer.data_ptr(), self.size, 0) == 0

    def _grow_to(self, total: int) -> bool:
        """Grow the buffer to ``total`` bytes; return whether its memory is new."""
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
                # Not sparse: a full disk then fails here, not with SIGBUS in the middle of the copy.
                os.posix_fallocate(self.fd, 0, total)
            self._buffer = torch.frombuffer(mmap.mmap(self.fd, total), dtype=torch.uint8)
        except BaseException:
            self.close()
            raise
        self.size = total
        self.generation += 1
        return True

    def memory(self) -> memoryview:
        """Return the whole buffer, for a rank that writes without a writer process."""
        assert self._buffer is not None
        return self._buffer.numpy().data

    def close(self) -> None:
        self._join_reserve()
        self.synchronize()  # a copy of an abandoned save may be in flight
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
    """Return the segment of each shard, in the order of ``shards``, and their total size.

    Frozen segments are the last ones in the buffer, so that an engine can write them into another file.
    """
    sizes = [s.local_tensor.numel() * s.local_tensor.element_size() for s in shards]
    has_frozen = sum(n for s, n in zip(shards, sizes, strict=True) if s.is_frozen) >= MIN_FROZEN_BYTES
    frozen = [has_frozen and s.is_frozen for s in shards]
    first_frozen = frozen.index(True) if has_frozen else None
    offsets, end = [0] * len(shards), 0
    for number in sorted(range(len(shards)), key=lambda n: frozen[n]):
        # The raw engine's files have whole pages of the buffer, so a large segment is page-aligned for direct reads.
        align = direct_io.ALIGN if sizes[number] >= _LARGE_BYTES or number == first_frozen else _ALIGN
        offsets[number] = -(-end // align) * align
        end = offsets[number] + sizes[number]
    return [_make_segment(*args) for args in zip(shards, offsets, sizes, frozen, strict=True)], end


def _make_segment(shard: LocalShard, offset: int, nbytes: int, is_frozen: bool) -> Segment:
    return Segment(
        name=shard.name,
        kind=shard.kind,
        dtype=str(shard.local_tensor.dtype).removeprefix("torch."),
        itemsize=shard.local_tensor.element_size(),
        shape=shard.shape,
        start=shard.start,
        chunk_shape=tuple(shard.local_tensor.shape),
        buffer_offset=offset,
        nbytes=nbytes,
        is_frozen=is_frozen,
    )


def available_memory() -> int:
    """Return the bytes that may still be allocated, on the machine and in the job's cgroup (version 2)."""
    available = int(psutil.virtual_memory().available)
    for folder in _list_own_cgroups():
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                # The page cache counts as used, but is reclaimed when memory is needed.
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
                available = min(available, int(limit) - used)
        except (OSError, ValueError):
            continue
    return max(0, available)


def _list_own_cgroups() -> list[Path]:
    """Return this process's cgroup and its ancestors, whose limits apply too."""
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
