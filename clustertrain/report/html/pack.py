"""Numbers small enough to be carried in a page: rounded to steps of their range, differences, deflated, base64.

``templates/telemetry/data.js`` undoes it.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from clustertrain.telemetry.analysis.resample import Matrix, Table

_FEW = 40_000  # values up to which a matrix is kept in 16 bits; more in 8, which is 0.4 % of the range


class Packer:
    """Takes tables, and gives where in :meth:`blob` each matrix is."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._at = 0

    def add(self, table: Table, scales: dict[str, float]) -> dict[str, Any]:
        """What the page has to know of ``table``; values are multiplied by ``scales``, curves without one left out."""
        found = {name: self._matrix(m * scales[name]) for name, m in table.values.items() if name in scales}
        return {"start": table.start, "step": table.step_s, "points": table.points, "curves": found}

    def blob(self) -> str:
        return base64.b64encode(zlib.compress(b"".join(self._parts), 9)).decode()

    def _matrix(self, matrix: Matrix) -> dict[str, Any]:
        bits = 16 if matrix.size <= _FEW else 8
        there = np.isfinite(matrix)
        low, high = (float(matrix[there].min()), float(matrix[there].max())) if there.any() else (0.0, 0.0)
        data = _differences(matrix, there, low, high, bits)
        place = {"at": self._at, "bits": bits, "rows": len(matrix), "low": low, "high": high}
        self._parts.append(data)
        self._at += len(data)
        return place


def _differences(matrix: Matrix, there: npt.NDArray[np.bool_], low: float, high: float, bits: int) -> bytes:
    """Of neighbours in time, modulo 2^bits; the highest number stands for a missing value. 16 bits: all low bytes,
    then all high ones, which deflate better apart."""
    kind: Any = np.uint16 if bits == 16 else np.uint8
    top = 2**bits - 2
    width = (high - low) or 1.0
    whole = np.full(matrix.shape, top + 1, dtype=kind)
    whole[there] = np.round((matrix[there] - low) / width * top).astype(kind)
    steps = np.diff(whole, axis=1, prepend=kind(0))  # wraps around
    if bits == 8:
        return steps.tobytes()
    return (steps & 0xFF).astype(np.uint8).tobytes() + (steps >> 8).astype(np.uint8).tobytes()
