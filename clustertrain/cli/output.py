"""Closed output streams, and output that could not be written."""

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
    """Replace a closed stdout or stderr (`>&-`, None in Python) with one that discards what is written."""
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
    """Print ``words`` to stderr. If that fails too, only the exit status reports the error."""
    with contextlib.suppress(OSError):
        click.echo(words, err=True)


def written_out(code: int) -> int:
    """Flush all output. Returns ``code``, or :data:`EXIT_FAILED` in place of 0 if output was lost.

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
