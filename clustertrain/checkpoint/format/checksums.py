"""Checksums: one for each block of at most 4 MiB of a shard, so that a part of it can be read and verified by itself,
and one of the shard over those."""

from __future__ import annotations

import xxhash

BLOCK_BYTES = 4 << 20
_HEX_DIGITS = 16  # of one block's checksum in hex


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def block_checksums(data: memoryview) -> str:
    """The xxh3-64 of each block, in hex, one after another; of no bytes the empty string."""
    return "".join(xxhash.xxh3_64_hexdigest(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES))


def shard_checksum(block_hashes: str) -> str:
    """A shard's checksum, from those of its blocks."""
    return checksum(block_hashes.encode())


def find_bad_block(data: memoryview, block_hashes: str, first_block: int) -> int | None:
    """Which block of ``data`` is not as it was written; ``data`` begins with block ``first_block`` of a shard with
    ``block_hashes`` and ends with a block's end. None: all are as they were."""
    for i in range(0, len(data), BLOCK_BYTES):
        n = first_block + i // BLOCK_BYTES
        if xxhash.xxh3_64_hexdigest(data[i : i + BLOCK_BYTES]) != block_hashes[n * _HEX_DIGITS : (n + 1) * _HEX_DIGITS]:
            return n
    return None


def align_to_blocks(low: int, high: int, size: int) -> tuple[int, int]:
    """The bytes ``low`` to ``high`` of a shard of ``size`` bytes, widened to whole blocks."""
    return low - low % BLOCK_BYTES, min(size, -(-high // BLOCK_BYTES) * BLOCK_BYTES)


def has_all_checksums(block_hashes: str, size: int) -> bool:
    """Whether there are as many checksums as blocks in ``size`` bytes."""
    return len(block_hashes) == -(-size // BLOCK_BYTES) * _HEX_DIGITS
