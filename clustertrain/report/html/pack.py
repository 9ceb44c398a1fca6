"""Pack numbers to embed them in a page: quantize to their range, delta-encode, deflate, base64.

``templates/telemetry/data.js`` unpacks them.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from clustertrain.telemetry.analysis.resample import CurveTable, Matrix

_MAX_16_BIT_VALUES = 40_000  # a larger matrix is stored in 8 bits, a resolution of 0.4 % of the range


class Packer:
    """Collects matrices into one blob, see :meth:`encode`, and returns the offset of each."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._offset = 0

    def add(self, table: CurveTable, scales: dict[str, float]) -> dict[str, Any]:
        """Add ``table`` and return its description; values are multiplied by ``scales``, other curves are left out."""
        curves = {name: self._add_matrix(m * scales[name]) for name, m in table.values.items() if name in scales}
        return {"start": table.start, "step": table.step_s, "points": table.points, "curves": curves}

    def encode(self) -> str:
        """Return all matrices, deflated and in base64."""
        return base64.b64encode(zlib.compress(b"".join(self._chunks), 9)).decode()

    def _add_matrix(self, matrix: Matrix) -> dict[str, Any]:
        bits = 16 if matrix.size <= _MAX_16_BIT_VALUES else 8
        finite = np.isfinite(matrix)
        low, high = (float(matrix[finite].min()), float(matrix[finite].max())) if finite.any() else (0.0, 0.0)
        data = _delta_encode(matrix, finite, low, high, bits)
        entry = {"offset": self._offset, "bits": bits, "rows": len(matrix), "low": low, "high": high}
        self._chunks.append(data)
        self._offset += len(data)
        return entry


def _delta_encode(matrix: Matrix, finite: npt.NDArray[np.bool_], low: float, high: float, bits: int) -> bytes:
    """Return the differences in time modulo 2^bits; the highest code is a missing value.

    With 16 bits, all low bytes come before all high bytes, which deflates better.
    """
    dtype: Any = np.uint16 if bits == 16 else np.uint8
    max_code = 2**bits - 2
    value_range = (high - low) or 1.0
    codes = np.full(matrix.shape, max_code + 1, dtype=dtype)
    codes[finite] = np.round((matrix[finite] - low) / value_range * max_code).astype(dtype)
    deltas = np.diff(codes, axis=1, prepend=dtype(0))  # wraps around
    if bits == 8:
        return deltas.tobytes()
    return (deltas & 0xFF).astype(np.uint8).tobytes() + (deltas >> 8).astype(np.uint8).tobytes()
