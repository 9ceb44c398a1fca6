"""Times on the command line: how long ago, or when."""

from __future__ import annotations

import datetime
import re

from clustertrain.errors import UsageError


def parse_moment(text: str, option: str, now: float) -> float:
    """Parse how long ago (``10m``, ``1h30m``, or seconds) or when (``14:30``, ``2026-01-31``, ``2026-01-31 14:30``).

    A time without a date is the last one before ``now``. Returns UTC epoch s.

    Raises:
        UsageError: it is neither, or in the future.
    """
    from clustertrain.cli.telemetry import parse_since

    moment = _parse_date_or_clock(text.strip(), now)
    if moment is None:
        try:
            return now - parse_since(text.strip(), option)
        except UsageError as e:
            raise UsageError(
                f"{option} {text} is neither a duration nor a time", fix="write 10m, 1h30m, 14:30 or '2026-01-31 14:30'"
            ) from e
    if moment > now:
        raise UsageError(f"{option} {text} is in the future", fix="write a time before now, or a duration such as 10m")
    return moment


def _parse_date_or_clock(text: str, now: float) -> float | None:
    try:
        if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
            clock = datetime.time.fromisoformat(text.rjust(len(text) + (text[1] == ":"), "0"))
            today = datetime.datetime.fromtimestamp(now)
            moment = datetime.datetime.combine(today.date(), clock)
            return (moment if moment <= today else moment - datetime.timedelta(days=1)).timestamp()
        if re.match(r"\d{4}-\d\d-\d\d", text):
            return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        pass
    return None
