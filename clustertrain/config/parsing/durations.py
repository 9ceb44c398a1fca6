"""Durations such as ``1h30min``.

:mod:`clustertrain.config.parsing.time_limits` reads Slurm's time limits."""

from __future__ import annotations

import re

_UNIT_S = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}
_TERM = r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|min|m|h|d)\s*"


def parse_duration_s(text: str) -> float | None:
    """Return a duration in seconds: ``30s``, ``10min`` (or ``10m``), ``2h``, ``1d``, or a sum such as ``1h30min``.

    None if ``text`` is not a duration.
    """
    if not re.fullmatch(rf"(?:{_TERM})+", text):
        return None
    return sum(float(number) * _UNIT_S[unit] for number, unit in re.findall(_TERM, text))
