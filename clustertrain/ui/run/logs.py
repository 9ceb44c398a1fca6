"""The logs of a run for its page: which there are, parts of them, new lines, and search."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

from clustertrain import reading
from clustertrain.errors import NotFound, UsageError
from clustertrain.report.html.text import clean, clean_log_line
from clustertrain.report.progress import Failure, iter_failures
from clustertrain.run.logs import files, lines
from clustertrain.run.logs.lines import LogWindow
from clustertrain.run.run_dir import AttemptDir, RunDir, explain_permission_errors
from clustertrain.ui.live import Change

JOB_LOG = "job"
MAX_LINES = 2000  # in one answer
MAX_FAILURES = 50
# A page that is this far behind, for example on a slow connection, continues with the newest lines.
MAX_BEHIND_BYTES = 1 << 20
_KEY = re.compile(r"(\d{1,9})/((?:rank-\d{1,9})|(?:agent-[^/\0]{1,255}))")


def list_logs(run: RunDir) -> dict[str, Any]:
    """Return the logs of each attempt with their keys and sizes in bytes, and how ranks of the last attempt failed."""
    attempts = run.attempts()
    failures = list(_iter_failures(run, attempts[-1])) if attempts else []
    document = {
        "job": {"key": JOB_LOG, "size": _size(run.job_log)},
        "attempts": [
            {
                "n": a.n,
                "ranks": [
                    {"key": f"{a.n}/{path.stem}", "rank": files.rank_of(path), "size": _size(path)}
                    for path in files.list_rank_logs(a)
                ],
                "agents": [
                    {"key": f"{a.n}/{path.stem}", "node": path.stem.removeprefix("agent-"), "size": _size(path)}
                    for path in sorted(a.logs.glob("agent-*.log"))
                ],
            }
            for a in attempts
        ],
        "failures": failures[:MAX_FAILURES],
        "failures_left_out": max(0, len(failures) - MAX_FAILURES),
    }
    return clean(document)


def _iter_failures(run: RunDir, attempt: AttemptDir) -> list[dict[str, Any]]:
    def key(failure: Failure) -> str:
        name = f"agent-{failure.node}" if failure.rank is None else f"rank-{failure.rank}"
        return f"{attempt.n}/{name}"

    return [
        {"who": f.who, "reason": f.reason, "key": key(f), "lines": f.lines if i == 0 else []}
        for i, f in enumerate(iter_failures(attempt))
    ]


def rank_log_paths(run: RunDir, attempt: int | None) -> dict[str, Path]:
    """Return the paths of the logs of all ranks by key, the newest attempt first."""
    selected = [a for a in reversed(run.attempts()) if attempt in (None, a.n)]
    return {f"{a.n}/{path.stem}": path for a in selected for path in files.list_rank_logs(a)}


def find_log(run: RunDir, key: str) -> Path:
    """Return the log of a key of :func:`list_logs`. It may not exist yet.

    Raises:
        NotFound: no log can have this key.
    """
    if key == JOB_LOG:
        return run.job_log
    match = _KEY.fullmatch(key)
    if match is None or not (attempt := run.attempt(int(match[1]))).path.is_dir():
        raise NotFound(f"{run.id} has no log {key!r}", fix="choose one of the list")
    return attempt.logs / f"{match[2]}.log"


def read_lines(run: RunDir, key: str, *, count: int, before: int | None, after: int | None) -> dict[str, Any]:
    """Return ``count`` lines: those from offset ``after`` (bytes), or the last ones before ``before``, or of the log.

    Raises:
        NotFound: there is no such log.
    """
    with explain_permission_errors():
        try:
            path, count = find_log(run, key), min(count, MAX_LINES)
            if after is not None:
                window = lines.read_after(path, after)
                window = window._replace(lines=window.lines[:count])
            else:
                window = lines.read_before(path, before, count)
        except FileNotFoundError:
            return {"key": key, "exists": False, "lines": [], "start": 0, "end": 0, "size": 0, "cursor": "0-0"}
    return {"key": key, "exists": True, **_window_document(window), "cursor": f"{window.end}-{window.size}"}


def _window_document(window: LogWindow) -> dict[str, Any]:
    return {
        "lines": [[line.offset, clean_log_line(line.text)] for line in window.lines],
        "start": window.start,
        "end": window.end,
        "size": window.size,
    }


class LogTopic:
    """The new lines of one log: a :class:`clustertrain.ui.live.Topic`.

    A cursor is the offset to read on from and the size that the log had. A change has ``restart`` if it does not
    continue what the page has: the log was replaced, or the page is too far behind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._size_seen = _size(path)

    def refresh(self) -> bool:
        size = _size(self._path)
        with self._lock:
            changed, self._size_seen = size != self._size_seen, size
        return changed

    def changes_since(self, cursor: str | None) -> Change | None:
        end, _, size_text = (cursor or "").partition("-")
        offset = int(end) if reading.is_unsigned_int(end) else None
        size = _size(self._path)
        if size is None or (offset is not None and size_text == str(size)):
            return None
        is_continued = offset is not None and offset <= size <= offset + MAX_BEHIND_BYTES
        try:
            window = (
                lines.read_after(self._path, offset, 2 * MAX_BEHIND_BYTES)
                if is_continued and offset is not None
                else lines.read_before(self._path, None, MAX_LINES // 4)
            )
        except OSError:
            return None
        return Change({**_window_document(window), "restart": not is_continued}, f"{window.end}-{window.size}")


def parse_query(text: str, *, is_regex: bool) -> None:
    """Raise UsageError if one cannot search for ``text``."""
    if not text or len(text) > 1000:
        raise UsageError("the search needs 1 to 1,000 characters", fix="type a word or a regular expression")
    if is_regex:
        from clustertrain.run.logs.search import compile_pattern

        compile_pattern(text, "search")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
