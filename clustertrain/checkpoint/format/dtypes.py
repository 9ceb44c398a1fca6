"""Conversion between the bytes of a tensor and NumPy arrays, by torch's dtype names and without torch.

NumPy lacks bfloat16 and the 8-bit formats. bfloat16 is the upper half of a float32; each 8-bit format has 256 values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustertrain.errors import CheckpointError

Raw = NDArray[np.uint8]  # (elements, itemsize)

FLOATS = ("float32", "bfloat16", "float16", "float64")  # the dtypes that a tensor can be converted to
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
BLOCK_ELEMENTS = 1 << 20  # elements processed at a time, so that temporary arrays take only megabytes

_NUMPY_DTYPES = frozenset(
    {"float64", "float32", "float16", "complex128", "complex64", "bool"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def _float8_table(exponent_bits: int, mantissa_bits: int, bias: int) -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return np.where(codes & 0x80, -size, size).astype(np.float32)


def _e4m3fn_values() -> NDArray[np.float32]:
    """Return the values: no Inf, and the last code of each sign is NaN (Micikevicius et al., arXiv 2209.05433)."""
    values = _float8_table(4, 3, 7)
    values[[0x7F, 0xFF]] = np.nan
    return values


def _e5m2_values() -> NDArray[np.float32]:
    values = _float8_table(5, 2, 15)
    values[[0x7C, 0xFC]] = np.inf, -np.inf
    values[0x7D:0x80] = values[0xFD:] = np.nan
    return values


_FLOAT8_VALUES = {"float8_e4m3fn": _e4m3fn_values(), "float8_e5m2": _e5m2_values()}


def decode(raw: Raw, dtype: str) -> NDArray[Any] | None:
    """Return the values of ``raw`` as an array of shape (elements,), or None for an unsupported dtype.

    The array has a NumPy dtype that represents the values exactly.

    Args:
        raw: contiguous bytes of shape (elements, itemsize).
        dtype: torch's name of their dtype.
    """
    if dtype in _NUMPY_DTYPES:
        return raw.reshape(-1).view(dtype)
    if dtype == "bfloat16":
        return (raw.reshape(-1).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in _FLOAT8_VALUES:
        decoded: NDArray[Any] = _FLOAT8_VALUES[dtype][raw.reshape(-1)]
        return decoded
    return None


def is_float(dtype: str) -> bool:
    """Return whether :func:`convert` can convert tensors of this dtype."""
    return dtype in FLOATS or dtype in _FLOAT8_VALUES


def encode(values: NDArray[Any], dtype: str) -> Raw:
    """Return floating-point ``values`` (elements,) as bytes of ``dtype``, one of FLOATS, rounded to nearest even."""
    with np.errstate(over="ignore", invalid="ignore"):  # invalid: a signaling NaN becomes a quiet one
        if dtype != "bfloat16":
            return values.astype(dtype).view(np.uint8).reshape(-1, ITEMSIZE[dtype])
        bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    rounded[np.isnan(values)] = 0x7FC0  # rounding up could turn NaN into Inf
    return rounded.astype(np.uint16).view(np.uint8).reshape(-1, 2)


def convert(raw: Raw, source: str, target: str, name: str) -> Iterator[memoryview]:
    """Yield the bytes of ``raw`` converted from ``source`` to ``target``, one block at a time.

    They are unchanged if the dtypes are equal or ``source`` is not a floating-point dtype.

    Raises:
        CheckpointError: a finite value of the tensor ``name`` is too large for ``target``.
    """
    if source == target or not is_float(source):
        yield raw.reshape(-1).data
        return
    for i in range(0, len(raw), BLOCK_ELEMENTS):
        values = decode(raw[i : i + BLOCK_ELEMENTS], source)
        assert values is not None
        encoded = encode(values, target)
        decoded = decode(encoded, target)
        assert decoded is not None
        if not np.array_equal(np.isfinite(values), np.isfinite(decoded)):
            raise CheckpointError(
                f"{name}: {np.abs(values[np.isfinite(values)]).max():.3g} is more than {target} can hold",
                fix="choose bfloat16 or float32",
            )
        yield encoded.reshape(-1).data
