"""Formats of the frozen weights under an adapter: bytes, without torch."""

from __future__ import annotations

from typing import Literal

BasePrecision = Literal["unchanged", "bf16", "int8", "nf4"]
LowBit = Literal["int8", "nf4"]

BLOCK = 64  # weights of one row that share a scale
SCALE_BYTES = 4  # fp32
# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero: the authors' values.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_CODE_BYTES = {"int8": BLOCK, "nf4": BLOCK // 2}


def block_bytes(precision: LowBit) -> int:
    """Return the bytes of a block: its scale and its codes."""
    return SCALE_BYTES + _CODE_BYTES[precision]


def packed_shape(precision: LowBit, rows: int, columns: int) -> tuple[int, int, int]:
    """Return the shape of the packed bytes of a (rows, columns) matrix. The last block of a row may be padded."""
    return rows, -(-columns // BLOCK), block_bytes(precision)
