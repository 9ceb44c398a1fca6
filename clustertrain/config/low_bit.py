"""Formats of the frozen weights under an adapter: bytes, without torch."""

from __future__ import annotations

from typing import Literal

BasePrecision = Literal["unchanged", "bf16", "int8", "nf4"]
LowBit = Literal["int8", "nf4"]

BLOCK = 64  # weights of one row that share a scale
SCALE_BYTES = 4  # fp32
_CODE_BYTES = {"int8": BLOCK, "nf4": BLOCK // 2}


def block_bytes(precision: LowBit) -> int:
    """Return the bytes of a block: its scale and its codes."""
    return SCALE_BYTES + _CODE_BYTES[precision]


def packed_shape(precision: LowBit, rows: int, columns: int) -> tuple[int, int, int]:
    """Return the shape of the packed bytes of a (rows, columns) matrix. The last block of a row may be padded."""
    return rows, -(-columns // BLOCK), block_bytes(precision)
