"""Durations as text."""

from __future__ import annotations


def format_duration(seconds: float) -> str:
    """Format a duration with two units: ``45s``, ``12m05s``, ``3h07m``, ``2d04h``."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"


def format_step_time(seconds: float) -> str:
    """Format the time of a step with three digits: ``0.43 ms``, ``412 ms``, ``4.12 s``, ``61.2 s``, ``1440 s``."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1000, "ms")
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f} {unit}"
