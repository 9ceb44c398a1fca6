"""Checksums of a shard: one per block of at most 4 MiB, to verify a part alone, and one over all blocks."""

from __future__ import annotations

import xxhash

BLOCK_BYTES = 4 << 20
_HEX_DIGITS = 16  # of one block's checksum in hex


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def block_checksums(data: memoryview, known: str = "") -> str:
    """Return the xxh3-64 of each block in hex, concatenated; an empty string for no bytes.

    Args:
        known: the checksums of the first blocks, if they have been computed before.
    """
    first = len(known) // _HEX_DIGITS * BLOCK_BYTES
    return known + "".join(
        xxhash.xxh3_64_hexdigest(data[i : i + BLOCK_BYTES]) for i in range(first, len(data), BLOCK_BYTES)
    )


def compare_blocks(data: memoryview, block_hashes: str) -> str:
    """Return the checksums of the blocks of ``data``, up to the first one that differs from ``block_hashes``."""
    computed = ""
    for i in range(0, len(data), BLOCK_BYTES):
        computed += xxhash.xxh3_64_hexdigest(data[i : i + BLOCK_BYTES])
        if not block_hashes.startswith(computed[-_HEX_DIGITS:], len(computed) - _HEX_DIGITS):
            break
    return computed


def shard_checksum(block_hashes: str) -> str:
    """Return the checksum of a shard from those of its blocks."""
    return checksum(block_hashes.encode())


def find_bad_block(data: memoryview, block_hashes: str, first_block: int) -> int | None:
    """Return the number of the first damaged block in ``data``, or None.

    ``data`` starts at block ``first_block`` of the shard with ``block_hashes``, and ends at the end of a block.
    """
    for i in range(0, len(data), BLOCK_BYTES):
        n = first_block + i // BLOCK_BYTES
        if xxhash.xxh3_64_hexdigest(data[i : i + BLOCK_BYTES]) != block_hashes[n * _HEX_DIGITS : (n + 1) * _HEX_DIGITS]:
            return n
    return None


def align_to_blocks(low: int, high: int, size: int) -> tuple[int, int]:
    """Return the range ``low`` to ``high`` of a shard of ``size`` bytes, extended to whole blocks."""
    return low - low % BLOCK_BYTES, min(size, -(-high // BLOCK_BYTES) * BLOCK_BYTES)


def has_all_checksums(block_hashes: str, size: int) -> bool:
    """Return whether there is one checksum for each block of ``size`` bytes."""
    return len(block_hashes) == -(-size // BLOCK_BYTES) * _HEX_DIGITS
