"""Calls in a forked child: torch caches meshes and process groups, which differ from trace to trace."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ChildFailed(Exception):
    """The call raised; the message is its traceback. ``error`` is the exception's type and message."""

    def __init__(self, error: str, details: str) -> None:
        super().__init__(details)
        self.error = error


def call_in_child(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return ``function(*args, **kwargs)``, computed in a child process.

    Fork before this process has run a backward pass, whose threads a child would lack.

    Raises:
        ChildFailed: the function raised, or the child was killed.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(_try_call(function, args, kwargs), pipe)
        finally:
            os._exit(0)  # whatever happens, the child must not return into the caller's loop
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not data:
        raise ChildFailed("killed", f"the child ended with status {status}")
    is_result, value = pickle.loads(data)  # noqa: S301 - from our own child
    if not is_result:
        raise ChildFailed(*value)
    return value  # type: ignore[no-any-return]


def _try_call(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Return (True, the result), or (False, the arguments of :class:`ChildFailed`)."""
    try:
        return True, function(*args, **kwargs)
    except BaseException as e:
        return False, (f"{type(e).__name__}: {e}", traceback.format_exc())
