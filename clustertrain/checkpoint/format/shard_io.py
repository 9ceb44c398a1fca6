"""Read shards, or parts of them, with their checksums; and the overlap of two blocks of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clustertrain.checkpoint.format import direct_io
from clustertrain.checkpoint.format.checksums import BLOCK_BYTES, aligned, first_bad
from clustertrain.checkpoint.format.manifest import Damaged, ShardRecord
from clustertrain.checkpoint.format.storage import Folder, Pread, opened
from clustertrain.checkpoint.format.storage_errors import patiently

# In one call to the kernel: several blocks, few enough that they are still in the processor's cache when hashed.
_AT_ONCE = 4 * BLOCK_BYTES
_AT_ONCE_DIRECT = 2 * BLOCK_BYTES
_WORTH_IT = 1 << 20  # bytes; reading ahead does more for small parts that lie side by side


def read_shard(folder: Folder, shard: ShardRecord) -> bytearray:
    """The bytes of ``shard``. Raises as :func:`read_into`."""
    data = bytearray(shard.nbytes)
    read_into(memoryview(data), folder, shard, 0)
    return data


def read_into(into: memoryview, folder: Folder, shard: ShardRecord, low: int, *, alone: bool = False) -> None:
    """Fill ``into`` with the bytes of ``shard`` from ``low`` on, verified. ``alone``: no other process of this machine
    wants them, so they need not be kept in memory.

    Raises:
        Damaged: the file is missing, too short, or its bytes are not those that were written.
        StorageError: it cannot be read, now at least.
    """
    path = folder / shard.file
    high = low + len(into)

    def read() -> None:
        if alone and isinstance(path, Path) and high - low >= _WORTH_IT:
            with direct_io.reading(path) as fd:
                if fd is not None and _read_direct(fd, path, shard, low, high, into):
                    return
        with opened(path) as pread:
            _read(pread, path, shard, low, high, into)

    try:
        patiently(read, path)
    except OSError as e:
        raise Damaged(f"{path}: {e.strerror or e}") from e


def _read_direct(fd: int, path: Path, shard: ShardRecord, low: int, high: int, into: memoryview) -> bool:
    """As :func:`_read`; False where the file system does not do it."""
    at, end = aligned(low, high, shard.nbytes)
    while at < end:
        stop = min(at + _AT_ONCE_DIRECT, end)
        data = direct_io.read(fd, shard.offset + at, stop - at)
        if data is None:
            return False
        if len(data) < stop - at:
            raise _too_short(path, shard.offset + at + len(data))
        _verify(data, path, shard, at)
        begin, finish = max(at, low), min(stop, high)
        direct_io.copy(into[begin - low : finish - low], data[begin - at : finish - at])
        at = stop
    return True


def _read(pread: Pread, path: Folder, shard: ShardRecord, low: int, high: int, into: memoryview) -> None:
    """Whole blocks go where they belong; a block that sticks out at either end is read beside and cut."""
    at, end = aligned(low, high, shard.nbytes)
    while at < end:
        # The blocks from here on that are wanted as a whole; the last one of a shard may be short.
        whole = end if end <= high else high - high % BLOCK_BYTES
        stop = min(at + _AT_ONCE, whole) if low <= at < whole else min(at + BLOCK_BYTES, end)
        cut = at < low or stop > high
        data = memoryview(bytearray(stop - at)) if cut else into[at - low : stop - low]
        _fill(pread, path, data, shard.offset + at)
        _verify(data, path, shard, at)
        if cut:
            begin, finish = max(at, low), min(stop, high)
            into[begin - low : finish - low] = data[begin - at : finish - at]
        at = stop


def _verify(data: memoryview, path: Folder, shard: ShardRecord, at: int) -> None:
    bad = first_bad(data, shard.blocks, at // BLOCK_BYTES)
    if bad is not None:
        first = shard.offset + bad * BLOCK_BYTES
        last = shard.offset + min(shard.nbytes, (bad + 1) * BLOCK_BYTES)
        raise Damaged(f"{path}: checksum of bytes {first} to {last} differs")


def _too_short(path: Folder, ends: int) -> Damaged:
    return Damaged(f"{path}: ends at byte {ends}, more were written")


def _fill(pread: Pread, path: Folder, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        got = pread(into[done:], offset + done)
        if got == 0:
            raise _too_short(path, offset + done)
        done += got


def overlap(
    a_start: Sequence[int], a_shape: Sequence[int], b_start: Sequence[int], b_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The part that two blocks share, as slices of the first and of the second; None where they share nothing."""
    in_a, in_b = [], []
    for sa, na, sb, nb in zip(a_start, a_shape, b_start, b_shape, strict=True):
        low, high = max(sa, sb), min(sa + na, sb + nb)
        if low >= high:
            return None
        in_a.append(slice(low - sa, high - sa))
        in_b.append(slice(low - sb, high - sb))
    return tuple(in_a), tuple(in_b)


def strides_of(shape: Sequence[int]) -> list[int]:
    """Of a block in C order, in elements."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.insert(0, step)
        step *= n
    return strides


def span(part: Sequence[slice], shape: Sequence[int]) -> tuple[int, int, bool]:
    """From which element to which (exclusive) ``part`` of a block in C order reaches, and whether it is all of that."""
    strides = strides_of(shape)
    first = sum(s.start * stride for s, stride in zip(part, strides, strict=True))
    last = sum((s.stop - 1) * stride for s, stride in zip(part, strides, strict=True))
    count = 1
    for s in part:
        count *= s.stop - s.start
    return first, last + 1, last + 1 - first == count
