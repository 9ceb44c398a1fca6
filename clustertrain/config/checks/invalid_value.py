"""A value that a table refuses, with what to write instead."""

from __future__ import annotations


class InvalidValue(ValueError):
    """Raised in ``__post_init__`` of a table.

    The message begins with ``KEY = VALUE: ``, both as ``repr`` writes them. The fix may have ``KEY = VALUE`` in it too.
    """

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def find_fix(error: BaseException | None) -> str | None:
    """Return the fix of the :class:`InvalidValue` that caused ``error``, if one did."""
    return error.fix if isinstance(error, InvalidValue) else None
