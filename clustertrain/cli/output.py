"""Handle closed output streams and output that cannot be written."""

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
def replace_closed_streams() -> Iterator[None]:
    """Replace a closed stdout or stderr (`>&-`, None in Python) with one that discards everything."""
    previous = sys.stdout, sys.stderr
    with contextlib.ExitStack() as opened:
        sys.stdout, sys.stderr = (
            # typeshed declares them as never None
            stream or opened.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123
            for stream in previous
        )
        try:
            yield
        finally:
            sys.stdout, sys.stderr = previous


def print_error(message: str) -> None:
    """Print ``message`` to stderr. If that fails too, only the exit status reports the error."""
    with contextlib.suppress(OSError):
        click.echo(message, err=True)


def flush_output(code: int) -> int:
    """Flush all output. Return ``code``, or :data:`EXIT_FAILED` instead of 0 if output was lost.

    Otherwise Python would flush at exit, and on failure print "Exception ignored in …" and exit with 120.
    """
    error = flush_error(sys.stdout)
    if error is not None:
        code = code or EXIT_FAILED
        if error.errno != errno.EPIPE:  # the reader closed the pipe, as `| head` does, and knows
            print_error(f"clustertrain: standard output: {error.strerror}")
    for stream in (sys.stdout, sys.stderr):
        if flush_error(stream) is not None:
            # Python would try again at exit.
            with contextlib.suppress(OSError), open(os.devnull, "wb") as devnull:  # noqa: PTH123
                os.dup2(devnull.fileno(), stream.fileno())
    return code


def flush_error(stream: IO[str]) -> OSError | None:
    """Flush the stream; return the error if its buffer cannot be written, or None."""
    try:
        stream.flush()
    except OSError as e:
        return e
    return None
