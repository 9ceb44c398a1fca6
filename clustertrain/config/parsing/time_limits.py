"""Slurm's format of time limits."""

from __future__ import annotations

import re

from clustertrain.errors import UsageError

_FORMATS = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
)


def parse_time_limit_s(text: str) -> float | None:
    """Return a time limit in seconds; None for no limit, which is an empty text, 0 (as for sbatch) or UNLIMITED.

    Raises:
        UsageError: ``text`` is not in a format that sbatch accepts.
    """
    if not text or text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text.strip(), re.ASCII)
    if match is None:
        raise UsageError(f"time limit {text!r}: not in a format that sbatch accepts", fix=f"use {_FORMATS}")
    days, first, second, third = (int(g) if g is not None else None for g in match.groups())
    if days is not None:
        hours, minutes, seconds = first or 0, second or 0, third or 0
    elif third is not None:
        hours, minutes, seconds = first or 0, second or 0, third
    else:
        hours, minutes, seconds = 0, first or 0, second or 0
    return float(((days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds) or None
