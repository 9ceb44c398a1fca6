"""Text that somebody else wrote, for a page.

The scripts insert it as text, so markup in it is harmless. Control characters are not: one that reverses the direction
of text makes a line look like another.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast

import msgspec

from clustertrain.printable import printable

T = TypeVar("T")
# Colors and other attributes of text (ECMA-48, SGR), and the erasure of a line: harmless, and in every other log.
_STYLES = re.compile(r"\x1b\[[0-9;:]*[mK]")


def clean(document: T) -> T:
    """Return JSON-like data with control characters in all texts escaped."""
    return cast(T, _clean(msgspec.to_builtins(document)))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, (list, tuple)) else value


def clean_log_line(line: str) -> str:
    """Return a line of a log without colors, with other control characters escaped."""
    return printable(_STYLES.sub("", line))
