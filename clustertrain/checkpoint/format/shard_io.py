"""Reads of shards and parts of them, verified if the shard has checksums, and geometry of shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clustertrain.checkpoint.format import direct_io
from clustertrain.checkpoint.format.checksums import BLOCK_BYTES, align_to_blocks, find_bad_block
from clustertrain.checkpoint.format.manifest import DamagedCheckpoint, ShardRecord
from clustertrain.checkpoint.format.storage import Folder, PreadFn, open_pread
from clustertrain.checkpoint.format.storage_errors import with_retries

# Per system call: several blocks, few enough to be still in the CPU cache when they are hashed.
_READ_BYTES = 4 * BLOCK_BYTES
_DIRECT_READ_BYTES = 2 * BLOCK_BYTES
_MIN_DIRECT_BYTES = 1 << 20  # for small adjacent parts, readahead is faster


def read_shard(folder: Folder, shard: ShardRecord) -> bytearray:
    """Return the bytes of ``shard``.

    Raises:
        DamagedCheckpoint, StorageError: see :func:`read_into`.
    """
    data = bytearray(shard.nbytes)
    read_into(memoryview(data), folder, shard, 0)
    return data


def read_into(buffer: memoryview, folder: Folder, shard: ShardRecord, low: int, *, alone: bool = False) -> None:
    """Fill ``buffer`` with the bytes of ``shard`` from ``low`` on, and verify them if the shard has checksums.

    Args:
        alone: no other process on this machine needs the bytes, so they bypass the page cache.

    Raises:
        DamagedCheckpoint: the file is missing or too short, or a checksum differs.
        StorageError: the file system failed.
    """
    path = folder / shard.file
    high = low + len(buffer)

    def read_once() -> None:
        if alone and isinstance(path, Path) and high - low >= _MIN_DIRECT_BYTES:
            with direct_io.open_for_read(path) as fd:
                if fd is not None and _read_direct(fd, path, shard, low, high, buffer):
                    return
        with open_pread(path) as pread:
            _read(pread, path, shard, low, high, buffer)

    try:
        with_retries(read_once, path)
    except OSError as e:
        raise DamagedCheckpoint(f"{path}: {e.strerror or e}") from e


def _read_direct(fd: int, path: Path, shard: ShardRecord, low: int, high: int, buffer: memoryview) -> bool:
    """Do the same as :func:`_read` with direct I/O; return False if the file system does not support it."""
    pos, aligned_end = _align(shard, low, high)
    while pos < aligned_end:
        read_end = min(pos + _DIRECT_READ_BYTES, aligned_end)
        data = direct_io.read(fd, shard.offset + pos, read_end - pos)
        if data is None:
            return False
        if len(data) < read_end - pos:
            raise _short_file_error(path, shard.offset + pos + len(data))
        _verify(data, path, shard, pos)
        copy_start, copy_stop = max(pos, low), min(read_end, high)
        direct_io.copy_bytes(buffer[copy_start - low : copy_stop - low], data[copy_start - pos : copy_stop - pos])
        pos = read_end
    return True


def _read(pread: PreadFn, path: Folder, shard: ShardRecord, low: int, high: int, buffer: memoryview) -> None:
    """Read whole blocks into ``buffer``; a block that only partly belongs there goes through a temporary buffer."""
    pos, aligned_end = _align(shard, low, high)
    while pos < aligned_end:
        # End of the whole blocks that go into the buffer; the last block of a shard may be short.
        full_end = aligned_end if aligned_end <= high else high - high % BLOCK_BYTES
        read_end = min(pos + _READ_BYTES, full_end) if low <= pos < full_end else min(pos + BLOCK_BYTES, aligned_end)
        is_partial = pos < low or read_end > high
        data = memoryview(bytearray(read_end - pos)) if is_partial else buffer[pos - low : read_end - low]
        _fill(pread, path, data, shard.offset + pos)
        _verify(data, path, shard, pos)
        if is_partial:
            copy_start, copy_stop = max(pos, low), min(read_end, high)
            buffer[copy_start - low : copy_stop - low] = data[copy_start - pos : copy_stop - pos]
        pos = read_end


def _align(shard: ShardRecord, low: int, high: int) -> tuple[int, int]:
    """Return the bytes to read for ``low`` to ``high``: whole blocks if these have checksums."""
    return align_to_blocks(low, high, shard.nbytes) if shard.blocks else (low, high)


def _verify(data: memoryview, path: Folder, shard: ShardRecord, pos: int) -> None:
    if not shard.blocks:
        return
    bad_block = find_bad_block(data, shard.blocks, pos // BLOCK_BYTES)
    if bad_block is not None:
        first = shard.offset + bad_block * BLOCK_BYTES
        last = shard.offset + min(shard.nbytes, (bad_block + 1) * BLOCK_BYTES)
        raise DamagedCheckpoint(f"{path}: checksum of bytes {first} to {last} differs")


def _short_file_error(path: Folder, end: int) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path}: ends at byte {end}, but more bytes were written")


def _fill(pread: PreadFn, path: Folder, buffer: memoryview, offset: int) -> None:
    filled = 0
    while filled < len(buffer):
        nread = pread(buffer[filled:], offset + filled)
        if nread == 0:
            raise _short_file_error(path, offset + filled)
        filled += nread


def overlap(
    a_start: Sequence[int], a_shape: Sequence[int], b_start: Sequence[int], b_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the intersection of two shards as slices of the first and of the second; None if it is empty."""
    in_a, in_b = [], []
    for sa, na, sb, nb in zip(a_start, a_shape, b_start, b_shape, strict=True):
        low, high = max(sa, sb), min(sa + na, sb + nb)
        if low >= high:
            return None
        in_a.append(slice(low - sa, high - sa))
        in_b.append(slice(low - sb, high - sb))
    return tuple(in_a), tuple(in_b)


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Return the strides, in elements, of a shard in C order."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.insert(0, step)
        step *= n
    return strides


def linear_span(slices: Sequence[slice], shape: Sequence[int]) -> tuple[int, int, bool]:
    """Return (first element, end, whether ``slices`` cover everything in between) of a shard in C order."""
    strides = contiguous_strides(shape)
    first = sum(s.start * stride for s, stride in zip(slices, strides, strict=True))
    last = sum((s.stop - 1) * stride for s, stride in zip(slices, strides, strict=True))
    count = 1
    for s in slices:
        count *= s.stop - s.start
    return first, last + 1, last + 1 - first == count
