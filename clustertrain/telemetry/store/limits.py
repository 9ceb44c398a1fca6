"""Valid ranges for the contents of a segment's files.

The files may be damaged or forged, so readers reject everything that a sampler cannot have written.
"""

from __future__ import annotations

from typing import Any

MAX_SECONDS = 1e9  # length of a segment, 31 years
MAX_MAGNITUDE = 1e25  # of the sum over all samples
MAX_BYTES = 1 << 28  # size of one file, and of one decompressed piece
MAX_RANKS = 1 << 24


def is_within(value: Any, low: float, high: float) -> bool:
    """Return whether ``low <= value <= high``; False for NaN."""
    return bool(low <= value <= high)
