"""What surrounds a run's telemetry on its page: setup, attempts, checkpoints, the end of a log. All of it bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from clustertrain.errors import ClusterTrainError
from clustertrain.report import checkpoint as checkpoint_text
from clustertrain.report import progress
from clustertrain.report.html import checkpoints, setup
from clustertrain.report.html.text import clean_log_line
from clustertrain.run import attempts
from clustertrain.run.attempts import Attempt
from clustertrain.run.run_dir import RunDir

MAX_LOG_LINES, MAX_LINE_CHARACTERS = 40, 500
MAX_DIFF_CHARACTERS = 20_000
MAX_CHECKPOINTS, MAX_PACKAGES = 50, 500

T = TypeVar("T")


class LogTail(msgspec.Struct, frozen=True):
    """The last lines of a log."""

    title: str
    path: str
    lines: list[str]


class CheckpointRow(msgspec.Struct, frozen=True):
    """A checkpoint as ``checkpoint list`` shows it."""

    step: int
    t: float | None
    size: str
    layout: str
    state: str
    is_best: bool


class PageContext(msgspec.Struct, frozen=True):
    """The parts; one that cannot be read is empty."""

    setup: dict[str, Any]
    """See :func:`clustertrain.report.html.setup.describe`."""
    history: list[Attempt]
    checkpoints: list[CheckpointRow]
    checkpoints_left_out: int
    log: LogTail | None


def load_context(run: RunDir) -> PageContext:
    """Load what the page shows besides telemetry, as far as the files can be read."""
    rows: list[dict[str, Any]] = _read(lambda: checkpoints.list_rows(run)["rows"], [])
    return PageContext(
        setup=_shorten(_read(lambda: setup.describe(run), {})),
        history=_read(lambda: attempts.load_attempts(run), []),
        checkpoints=[_checkpoint(row) for row in rows[:MAX_CHECKPOINTS]],
        checkpoints_left_out=max(0, len(rows) - MAX_CHECKPOINTS),
        log=_read(lambda: _tail(run), None),
    )


def _read(part: Callable[[], T], default: T) -> T:
    try:
        return part()
    except (ClusterTrainError, OSError, ValueError):  # the insights name unreadable files
        return default


def _shorten(document: dict[str, Any]) -> dict[str, Any]:
    code = document.get("code")
    if code and len(code["diff"]) > MAX_DIFF_CHARACTERS:
        code = {**code, "diff": code["diff"][:MAX_DIFF_CHARACTERS], "diff_truncated": True}
    packages = document.get("packages")
    if isinstance(packages, dict):
        packages = dict(list(packages.items())[:MAX_PACKAGES])
    return {**document, "code": code, "packages": packages} if document else {}


def _checkpoint(row: dict[str, Any]) -> CheckpointRow:
    return CheckpointRow(
        step=row["step"],
        t=row["t"],
        size=checkpoint_text.format_size(row["bytes"]),
        layout=row["layout"],
        state=row["state"],
        is_best=bool(row["best"]),
    )


def _tail(run: RunDir) -> LogTail | None:
    """Return the end of the log that explains a failure, else of rank 0 of the newest attempt, else of the job."""
    newest = next(iter(reversed(run.attempts())), None)
    has_failed = newest is not None and attempts.load_attempt(run, newest).ending not in progress.NOT_FAILED
    failure = next(progress.iter_failures(newest), None) if newest is not None and has_failed else None
    if failure is not None:
        return _log_tail(f"{failure.who} failed: {failure.reason}", failure.log, failure.lines)
    paths = [newest.rank_log(0)] if newest is not None else []
    for path, title in [*((p, "rank 0") for p in paths), (run.job_log, "the job")]:
        if lines := progress.last_lines(progress.read_tail(path), MAX_LOG_LINES):
            return _log_tail(f"Last lines of {title}", str(path), lines)
    return None


def _log_tail(title: str, path: str, lines: list[str]) -> LogTail:
    return LogTail(title, path, [clean_log_line(line)[:MAX_LINE_CHARACTERS] for line in lines])
