"""Failures of hooks: said once, and never the program's."""

from __future__ import annotations

import functools
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes milliseconds in every Python process
    from typing import Any, Callable


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` such that an error is printed, returns None, and makes later calls do nothing."""
    failed = False

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        if failed:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as e:
            import traceback

            failed = True
            where = traceback.extract_tb(e.__traceback__)[-1]
            print(
                f"clustertrain: hook {function.__name__} failed and is off; the program goes on: "
                f"{type(e).__name__}: {e} ({where.name}, line {where.lineno} of {where.filename})",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            return None

    return call
