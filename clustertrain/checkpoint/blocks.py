"""Blocks of bytes: read one shard with its checksum, and the overlap of two blocks of a tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from clustertrain.checkpoint.manifest import Damaged, ShardRecord, checksum
from clustertrain.checkpoint.storage import patiently


def read_shard(folder: Path, shard: ShardRecord) -> bytearray:
    """The bytes of ``shard``.

    Raises:
        Damaged: the file is missing, too short, or its bytes are not those that were written.
        StorageError: it cannot be read, now at least.
    """
    path = folder / shard.file
    data = bytearray(shard.nbytes)
    view = memoryview(data)

    def read() -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            done = 0
            while done < shard.nbytes:
                got = os.preadv(fd, [view[done:]], shard.offset + done)
                if got == 0:
                    raise Damaged(f"{path}: ends at byte {shard.offset + done}, more were written")
                done += got
        finally:
            os.close(fd)

    try:
        patiently(read, path)
    except OSError as e:
        raise Damaged(f"{path}: {e.strerror or e}") from e
    if checksum(view) != shard.checksum:
        raise Damaged(f"{path}: checksum of bytes {shard.offset} to {shard.offset + shard.nbytes} differs")
    return data


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
