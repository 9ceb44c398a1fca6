"""Functions run in a process of their own on the emulated device."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.ranks.rank_pool import CONTEXT


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Return what ``function(*args)`` returns; raise a RuntimeError with the message of what it raises."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_call, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        ok, value = ours.recv()
    except EOFError:
        ok, value = False, "the process died"
    process.join(60)
    if not ok:
        raise RuntimeError(value)
    return value


def _call(pipe: Connection[Any, Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(*args)))
    except Exception as e:
        pipe.send((False, f"{type(e).__name__}: {e}"))
