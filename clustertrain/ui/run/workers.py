"""Child processes for the expensive parts of a run's page: the summary of all its samples, and the search in its logs.

In the server, a long computation would keep all pages from their answers, and nothing could end a regular expression
that takes forever on some line. :mod:`clustertrain.ui.run.child` is the other side.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from clustertrain import proc, reading
from clustertrain.errors import CommandFailed

SEARCH_TIMEOUT_S = 10.0
SUMMARY_TIMEOUT_S = 600.0
_CHILD = "clustertrain.ui.run.child"
_START_S = 20.0  # for Python and its imports on a slow file system
_MAX_ANSWER_BYTES = 256 * reading.MIB


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True, tag="search"):
    """Search for ``text``."""

    logs: Mapping[str, bytes]
    """Paths by key. A path need not be UTF-8; bytes become base64 in JSON."""
    text: str
    is_regex: bool
    out: str = ""


class SummaryRequest(msgspec.Struct, frozen=True, kw_only=True, tag="summary"):
    """Summarize the telemetry of the run in folder ``run``."""

    run: bytes
    state: str | None
    """Of the run, as the scheduler knows it; None: unknown."""
    out: str = ""


Request = SearchRequest | SummaryRequest


def call(request: Request, timeout_s: float, should_cancel: Callable[[], bool]) -> bytes:
    """Answer a request in a child process; return the JSON of the answer, empty if it was cancelled.

    Raises:
        CommandFailed: it took longer than ``timeout_s``, or failed; the message has the end of its output.
    """
    argv = proc.python_module_argv(sys.executable, _CHILD)
    with tempfile.TemporaryDirectory(prefix="clustertrain-ui-") as folder:
        out = Path(folder) / "answer.json"
        data = msgspec.json.encode(msgspec.structs.replace(request, out=str(out)))
        proc.run_with_stdin(argv, data, timeout_s=timeout_s + _START_S, should_cancel=should_cancel)
        with contextlib.suppress(FileNotFoundError):
            return reading.read_bytes(out, _MAX_ANSWER_BYTES)
    if should_cancel():
        return b""
    raise CommandFailed("the child process ended without an answer")
