"""Where to start to read a log: at its last lines, or at a time. It is read from its end, as far as needed."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from clustertrain import reading

BLOCK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20  # a longer line is split
MAX_UNTIMED_BYTES = 1 << 28  # read in search of a line with a time
CLOCK_SLACK_S = 120.0  # by which the clocks of a node and of the file server may differ

# A carriage return also ends a line: a progress bar writes nothing else for hours.
_LINE_END = re.compile(rb"\r\n|\n|\r")
# 2026-01-31 12:00:05,123 or 2026-01-31T12:00:05Z near the start; glog's I0131 12:00:05; 12:00:05 as in our own rows.
_DATE = re.compile(rb".{0,120}?\b(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,]\d{1,9})?(Z|[+-]\d\d:?\d\d)?")
_GLOG = re.compile(rb"(?:\[[^\]\s]{1,40}\]:? ?)?[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\b")
_CLOCK = re.compile(rb"[^\w\s]?(\d\d):(\d\d):(\d\d)(?=[\s\].,])")


class LastLines(NamedTuple):
    """The last lines of a log that match."""

    start: int
    """Offset of the first of them; the end of the file if there are none."""
    found: int
    """How many there are, at most the requested number."""


def find_last(path: Path, count: int, pattern: re.Pattern[str] | None = None) -> LastLines:
    """Find the last ``count`` lines that match ``pattern``.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if it does not exist.
    """
    with reading.open_regular(path) as f:
        start, found = f.seek(0, os.SEEK_END), 0
        if count == 0:
            return LastLines(start, 0)
        for offset, line in _iter_backwards(f):
            if pattern is None or pattern.search(line.decode(errors="backslashreplace").rstrip("\r\n")):
                start, found = offset, found + 1
                if found == count:
                    break
    return LastLines(start, found)


def find_since(path: Path, since: float) -> int | None:
    """Return the offset of the first line at or after ``since``, UTC epoch s; None if the log has no times.

    A line without a time counts as the one before it. Times without a zone are those of this machine, and a time
    without a date is the latest one that is not after the line that follows, or the last write.

    Raises:
        OSError: the file cannot be read; FileNotFoundError if it does not exist.
    """
    with reading.open_regular(path) as f:
        end = f.seek(0, os.SEEK_END)
        latest = os.fstat(f.fileno()).st_mtime
        if latest < since:
            return end
        start: int | None = None
        for offset, line in _iter_backwards(f):
            t = _parse_time(line, latest + CLOCK_SLACK_S)
            if t is not None:
                if t < since:
                    return end if start is None else start
                start, latest = offset, t
            elif (end if start is None else start) - offset > MAX_UNTIMED_BYTES:
                return start
    return None if start is None else 0


def _iter_backwards(f: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of each line with its end, the last one first."""
    start, text = f.seek(0, os.SEEK_END), b""
    while start > 0:
        size = min(BLOCK_BYTES, start)
        start -= size
        f.seek(start)
        text = f.read(size) + text
        # A line feed at the very start may follow a carriage return.
        ends = [m.end() for m in _LINE_END.finditer(text) if m.start() > 0 or start == 0]
        if start == 0:
            ends.insert(0, 0)
        elif not ends or (len(ends) == 1 and ends[0] == len(text)):
            if len(text) <= MAX_LINE_BYTES:
                continue
            ends = [0]
        for low, high in zip(reversed(ends), reversed([*ends[1:], len(text)]), strict=True):
            if high > low:
                yield start + low, text[low:high]
        text = text[: ends[0]]


def _parse_time(line: bytes, latest: float) -> float | None:
    """Return the time at the start of a line, UTC epoch s, not after ``latest`` if it has no date; None without one."""
    head = line[:200]
    try:
        if found := _DATE.match(head):
            numbers = [int(n) for n in found.groups()[:6]]
            zone = found[7]
            moment = datetime.datetime(*numbers)  # type: ignore[arg-type]
            if zone is not None:
                zone_text = zone.decode().replace("Z", "+00:00")
                moment = datetime.datetime.fromisoformat(moment.isoformat() + zone_text)
            return moment.timestamp()
        if found := _GLOG.match(head):
            month, day, hour, minute, second = (int(n) for n in found.groups())
            year = datetime.datetime.fromtimestamp(latest).year
            in_year = datetime.datetime(year, month, day, hour, minute, second)
            moments = (in_year.timestamp(), in_year.replace(year=year - 1).timestamp())
            return next((t for t in moments if t <= latest), None)
        if found := _CLOCK.match(head):
            today = datetime.datetime.fromtimestamp(latest).replace(microsecond=0)
            hour, minute, second = (int(n) for n in found.groups())
            moment = today.replace(hour=hour, minute=minute, second=second)
            return (moment if moment.timestamp() <= latest else moment - datetime.timedelta(days=1)).timestamp()
    except (ValueError, OverflowError):  # 99:99:99
        pass
    return None
