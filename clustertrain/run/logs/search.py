"""Search in logs, the newest lines first, within a limit of time and of matches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from clustertrain import clock, reading
from clustertrain.errors import UsageError
from clustertrain.run.logs import lines

BLOCK_BYTES = 1 << 20
MAX_MATCH_CHARACTERS = 2000
_BEFORE_MATCH = 200  # of them


class Match(NamedTuple):
    """A line that matches."""

    path: Path
    offset: int
    """Of the line, or of the piece of an endless line."""
    text: str
    """Of a line over :data:`MAX_MATCH_CHARACTERS`, the part around what was found."""


class SearchResult(NamedTuple):
    """The matches, by file and place, and how much was searched."""

    matches: list[Match]
    searched_bytes: int
    total_bytes: int
    problems: list[str]
    """Files that cannot be read, each with the reason."""

    @property
    def is_complete(self) -> bool:
        return self.searched_bytes >= self.total_bytes


class Query(NamedTuple):
    """What to search for."""

    pattern: re.Pattern[str]
    literal: bytes | None = None
    """A block of lines that does not contain this, in lower case, has no match; None: unknown."""


def compile_pattern(pattern: str, option: str) -> re.Pattern[str]:
    """Compile a regular expression that a user typed.

    Raises:
        UsageError: it is not one.
    """
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        raise UsageError(
            f"{option} {pattern!r} is not a regular expression: {e}",
            fix="put a \\ before each of .*+?()[]{}^$| that is text",
        ) from e


def find_text(text: str) -> Query:
    """Return a query for ``text``, in upper or lower case."""
    # bytes.lower() knows the case of ASCII only.
    literal = text.lower().encode() if text.isascii() else None
    return Query(re.compile(re.escape(text), re.IGNORECASE), literal)


def search(paths: Sequence[Path], query: Query, *, max_matches: int, timeout_s: float) -> SearchResult:
    """Search the ends of all files first, then what precedes them, until there are ``max_matches``."""
    deadline = clock.monotonic() + timeout_s
    problems: list[str] = []
    cursors: list[_Cursor] = []
    for path in paths:
        try:
            cursors.append(_Cursor(path, path.stat().st_size))
        except FileNotFoundError:
            continue
        except OSError as e:
            problems.append(f"{path}: {e.strerror or e}")
    total = sum(c.stop for c in cursors)
    found: list[Match] = []
    remaining = cursors
    while remaining and len(found) < max_matches and clock.monotonic() < deadline:
        for cursor in remaining:
            if len(found) >= max_matches or clock.monotonic() >= deadline:
                break
            try:
                found += cursor.search_block(query)[-(max_matches - len(found)) :]
            except OSError as e:
                problems.append(f"{cursor.path}: {e.strerror or e}")
                cursor.stop = 0
        remaining = [c for c in remaining if c.stop > 0]
    order = {path: i for i, path in enumerate(paths)}
    found.sort(key=lambda m: (order[m.path], m.offset))
    return SearchResult(found, total - sum(c.stop for c in cursors), total, problems)


class _Cursor:
    """The part of a file that has not been searched yet: its first ``stop`` bytes."""

    def __init__(self, path: Path, stop: int) -> None:
        self.path = path
        self.stop = stop

    def search_block(self, query: Query) -> list[Match]:
        """Search the last block of whole lines; a line longer than a block is searched in parts."""
        start = max(0, self.stop - BLOCK_BYTES)
        with reading.open_regular(self.path) as f:
            f.seek(start)
            text = f.read(self.stop - start)
        first = 0 if start == 0 else text.find(b"\n") + 1
        first = first if first < len(text) else 0
        self.stop = start + first if text else 0
        text = text[first:]
        if query.literal is not None and query.literal not in text.lower():
            return []
        return _list_matches(self.path, self.stop, text, query.pattern)


def _list_matches(path: Path, start: int, text: bytes, pattern: re.Pattern[str]) -> list[Match]:
    matches = []
    for line in text.split(b"\n"):
        for piece in lines.split_at(line, start) if line else ():
            if (found := pattern.search(piece.text)) is not None:
                matches.append(Match(path, piece.offset, _cut(piece.text, found.start())))
        start += len(line) + 1
    return matches


def _cut(text: str, found_at: int) -> str:
    """Return the part of a line around ``found_at``."""
    start = max(0, found_at - _BEFORE_MATCH) if len(text) > MAX_MATCH_CHARACTERS else 0
    end = start + MAX_MATCH_CHARACTERS
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
