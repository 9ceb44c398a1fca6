"""Utilization and insights of the runs in the table: computed in a child process, and kept in the user's cache folder.

A summary of a run reads all its roll-ups, which takes from 0.1 to 3 s. In the server it would keep all pages waiting.
Those of ended runs never change, so the next server finds them in the cache.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from clustertrain import clock, proc, reading, schema
from clustertrain.errors import CommandFailed
from clustertrain.run.run_dir import RunDir
from clustertrain.ui.cache import Cache, make_key
from clustertrain.ui.rows import Details
from clustertrain.ui.stamps import Stamp

BATCH = 8  # runs per child process, whose start takes as long as some summaries
TIMEOUT_S = 600.0
_CHILD = "clustertrain.ui.details_child"


class Request(msgspec.Struct, frozen=True):
    """Runs to summarize."""

    runs: list[tuple[bytes, str | None]]
    """Folder and state of each. A path need not be UTF-8; bytes become base64 in JSON."""
    out: str


class Answer(msgspec.Struct, frozen=True):
    """The details of one run."""

    index: int
    """In the runs of the request."""
    details: Details


class Wanted(msgspec.Struct, frozen=True):
    """A run whose details are wanted."""

    run: RunDir
    state: str | None
    stamp: Stamp
    """Of the files that decide about its status."""
    is_final: bool


class DetailsReader:
    """Computes the details of runs, one child process at a time. Safe in threads."""

    def __init__(self, report: Callable[[Mapping[Wanted, Details], float], None]) -> None:
        """``report`` receives the details of some runs, and the seconds per run that they took."""
        self._report = report
        self._cache = Cache("details", Details)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def close(self) -> None:
        """End the child process."""
        self._is_closed = True

    def find_cached(self, wanted: Wanted) -> Details | None:
        """Return the details of an ended run if they are in the cache."""
        return self._cache.get(_cache_key(wanted)) if wanted.is_final else None

    def start(self, wanted: list[Wanted]) -> bool:
        """Begin to compute, unless that is still going on; return whether it has begun."""
        with self._lock:
            if self._is_closed or not wanted or (self._thread is not None and self._thread.is_alive()):
                return False
            self._thread = threading.Thread(target=self._compute, args=(wanted,), name="ui-details", daemon=True)
            self._thread.start()
            return True

    def _compute(self, wanted: list[Wanted]) -> None:
        for i in range(0, len(wanted), BATCH):
            batch, started = wanted[i : i + BATCH], clock.monotonic()
            try:
                answers = _call(batch, lambda: self._is_closed)
            except OSError as e:
                answers = {i: Details(error=str(e)) for i in range(len(batch))}
            if self._is_closed:
                return
            known = {w: answers[i] for i, w in enumerate(batch) if i in answers}
            self._cache.add({_cache_key(w): d for w, d in known.items() if w.is_final and d.error is None})
            self._report(known, (clock.monotonic() - started) / max(1, len(batch)))
        self._cache.save()


def _call(wanted: list[Wanted], should_cancel: Callable[[], bool]) -> dict[int, Details]:
    """Return the details by place in ``wanted``, as far as the child process has come.

    A run at which it failed, or which took too long, has the error; those after it are missing.
    """
    with tempfile.TemporaryDirectory(prefix="clustertrain-ui-") as folder:
        out = Path(folder, "answers.jsonl")
        request = Request([(os.fsencode(w.run.path), w.state) for w in wanted], str(out))
        failure = None
        try:
            proc.run_with_stdin(
                proc.python_module_argv(sys.executable, _CHILD),
                msgspec.json.encode(request),
                timeout_s=TIMEOUT_S,
                should_cancel=should_cancel,
            )
        except CommandFailed as e:
            failure = e
        lines = list(reading.iter_lines(out)) if out.exists() else []
        answers = [schema.decode(line, Answer) for line in lines if line.strip()]
        details = {answer.index: answer.details for answer in answers}
        if failure is not None and len(details) < len(wanted):
            details[len(details)] = Details(error=str(failure))
        return details


def _cache_key(wanted: Wanted) -> str:
    return make_key(wanted.run.id, wanted.state, wanted.stamp)
