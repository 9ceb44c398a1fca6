"""The beginning and the end of a command's output: streams that were closed, and what could not be written."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import IO

import click

from clustertrain.errors import EXIT_FAILED


@contextlib.contextmanager
def standing_streams() -> Iterator[None]:
    """In the place of a stream that was closed, `>&-`, for which Python has None, there is one that leads nowhere."""
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as opened:
        sys.stdout, sys.stderr = (
            # typeshed calls them never None
            stream or opened.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123
            for stream in before
        )
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def complain(words: str) -> None:
    """On stderr. Where that is lost as well, the exit status alone tells."""
    with contextlib.suppress(OSError):
        click.echo(words, err=True)


def written_out(code: int) -> int:
    """The exit status, once all output is written; one of failure in the place of 0 where it could not be.

    Python writes out what is left at its end: where that fails it prints "Exception ignored in …" and exits with 120.
    """
    lost = unwritten(sys.stdout)
    if lost is not None:
        code = code or EXIT_FAILED
        if lost.errno != errno.EPIPE:  # whoever reads has left, `| head`, and knows
            complain(f"clustertrain: standard output: {lost.strerror}")
    for stream in (sys.stdout, sys.stderr):
        if unwritten(stream) is not None:
            # It would be tried again.
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123
                os.dup2(nowhere.fileno(), stream.fileno())
    return code


def unwritten(stream: IO[str]) -> OSError | None:
    """Why what the stream still holds cannot be written; None where it holds nothing any more."""
    try:
        stream.flush()
    except OSError as e:
        return e
    return None
