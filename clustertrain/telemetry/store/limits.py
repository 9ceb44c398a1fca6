"""The bounds of what a segment's files may say. They may be damaged, or of another hand: a reader takes nothing from
them that a sampler cannot have written."""

from __future__ import annotations

from typing import Any

MAX_SECONDS = 1e9  # seconds of one segment, 31 years
MAX_MAGNITUDE = 1e25  # of a sum of all that was sampled
MAX_BYTES = 1 << 28  # of one file, and of what one piece is unpacked to
MAX_RANKS = 1 << 24


def is_within(value: Any, low: float, high: float) -> bool:
    """Of a number; no for NaN."""
    return bool(low <= value <= high)
