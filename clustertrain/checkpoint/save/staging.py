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

from clustertrain.checkpoint.core.state_dict import Block
from clustertrain.checkpoint.format import direct_io
from clustertrain.checkpoint.format.staged_segments import Segment

_ALIGN = 64  # bytes; no element is larger
_LARGE = 1 << 20
_ENOUGH = 0.8  # of the memory that is free may be taken; the rest is for what the next step needs
_GRAIN = 1 << 20
_POPULATE_WRITE = 23  # of madvise, Linux 5.14 and newer
_POPULATE_BYTES = 64 << 20  # in one call, which holds the lock of this process's memory map


class Staging:
    """One buffer: nothing is in it while its bytes are being written. It grows to the largest save and stays: the
    kernel has to find and clear each page of new memory, which takes up to ten times as long as the copy itself.
    :meth:`reserve` has that done ahead of the first save, beside the training.

    It is an anonymous file in memory and not one in /dev/shm, which many containers have 64 MiB of and where a killed
    process leaves its files behind. Where so much memory is not free, it is a file without a name in ``spill``.
    """

    def __init__(self, spill: Path, device: torch.device, sharers: int = 1) -> None:
        """``sharers``: how many buffers of all ranks of the machine want the memory that is free."""
        self._spill = spill
        self._sharers = sharers
        self._device = device
        self._pinned = False
        self._reserving: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._whole: torch.Tensor | None = None
        self.fd: int | None = None
        self.generation = 0  # of the memory: a new one may have the number of the old one's file descriptor
        self.size = 0
        self.in_memory = True

    def fill(self, blocks: Sequence[Block]) -> list[Segment]:
        """Copy ``blocks``; on a GPU that is under way when it returns, see :meth:`ready`.

        Raises:
            OSError: neither memory nor disk has the room.
        """
        segments, total = _placed(blocks)
        self._reserved()
        if self._grow(total):
            self._pin()
        if self._device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._copy(blocks, segments)
            # What comes next in the step may overwrite what is being copied. The device waits, the host does not.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        else:
            self._copy(blocks, segments)
        return segments

    @property
    def asynchronous(self) -> bool:
        """Whether :meth:`ready` may have to wait."""
        return self._stream is not None

    def ready(self) -> None:
        """Wait until all bytes have arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, blocks: Sequence[Block], segments: Sequence[Segment]) -> None:
        assert self._whole is not None or not blocks
        for block, segment in zip(blocks, segments, strict=True):
            if segment.nbytes and self._whole is not None:
                place = self._whole[segment.at : segment.at + segment.nbytes].view(block.local.dtype)
                local = block.local.detach().resolve_conj().resolve_neg()
                place.view(block.local.shape).copy_(local, non_blocking=self._pinned)

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Begin to make room for ``blocks``; does not wait.

        Raises:
            OSError: as :meth:`fill`.
        """
        self._reserved()
        if self._grow(_placed(blocks)[1]):
            self._reserving = threading.Thread(target=self._prepare)
            self._reserving.start()

    def _reserved(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def _prepare(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread, which would have a context on the first GPU else
        if self.in_memory and self._whole is not None:
            madvise = getattr(ctypes.CDLL(None), "madvise", None)
            for at in range(0, self.size, _POPULATE_BYTES):
                length = min(_POPULATE_BYTES, self.size - at)
                address = ctypes.c_void_p(self._whole.data_ptr() + at)
                if madvise is None or madvise(address, ctypes.c_size_t(length), _POPULATE_WRITE):
                    break  # an older kernel: the first save does it
        self._pin()

    def _pin(self) -> None:
        """Without it copies from a GPU go through a small buffer of the driver's, and wait for each other."""
        if self._device.type == "cuda" and self.in_memory and self._whole is not None:
            self._pinned = _cudart().cudaHostRegister(self._whole.data_ptr(), self.size, 0) == 0

    def _grow(self, total: int) -> bool:
        """Whether there is new memory."""
        total = -(-max(total, 1) // _GRAIN) * _GRAIN
        if total <= self.size:
            return False
        self.close()
        self.in_memory = total <= _ENOUGH * available_memory() / self._sharers
        try:
            if self.in_memory and hasattr(os, "memfd_create"):
                self.fd = os.memfd_create("clustertrain-staging")
                os.truncate(self.fd, total)
            else:
                with tempfile.TemporaryFile(dir=self._spill) as file:
                    self.fd = os.dup(file.fileno())
                # Not sparse: where the disk is full, that is told now, and not by SIGBUS in the middle of the copy.
                os.posix_fallocate(self.fd, 0, total)
            self._whole = torch.frombuffer(mmap.mmap(self.fd, total), dtype=torch.uint8)
        except BaseException:
            self.close()
            raise
        self.size = total
        self.generation += 1
        return True

    def memory(self) -> memoryview:
        """All of it, for the process that writes in its own."""
        assert self._whole is not None
        return self._whole.numpy().data

    def close(self) -> None:
        self._reserved()
        self.ready()  # a copy may be under way that nobody wants any more
        if self._pinned and self._whole is not None:
            _cudart().cudaHostUnregister(self._whole.data_ptr())
        self._pinned = False
        self._whole = None
        if self.fd is not None:
            os.close(self.fd)
        self.fd, self.size = None, 0


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _placed(blocks: Sequence[Block]) -> tuple[list[Segment], int]:
    """Where each block goes, and how many bytes that takes."""
    segments, at = [], 0
    for b in blocks:
        nbytes = b.local.numel() * b.local.element_size()
        # A file has them at the same places, where reading a large one does not begin in the middle of a page.
        align = _ALIGN if nbytes < _LARGE else direct_io.ALIGN
        at = -(-at // align) * align
        segments.append(
            Segment(
                name=b.name,
                kind=b.kind,
                dtype=str(b.local.dtype).removeprefix("torch."),
                itemsize=b.local.element_size(),
                shape=b.shape,
                start=b.start,
                part=tuple(b.local.shape),
                at=at,
                nbytes=nbytes,
            )
        )
        at += nbytes
    return segments, at


def available_memory() -> int:
    """Bytes that may still be allocated: of the machine, and of the cgroup (version 2) that the job is confined to."""
    found = int(psutil.virtual_memory().available)
    for folder in _own_cgroups():
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                # The page cache counts as used and goes when memory is wanted.
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
                found = min(found, int(limit) - used)
        except (OSError, ValueError):
            continue
    return max(0, found)


def _own_cgroups() -> list[Path]:
    """This process's cgroup and those above it, whose limits hold too."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    folder = root / own.lstrip("/")
    return [folder, *(p for p in folder.parents if p.is_relative_to(root))]
