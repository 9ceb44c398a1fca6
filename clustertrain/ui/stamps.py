"""Whether files have changed, without reading them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from clustertrain.run.run_dir import AttemptDir, RunDir

Stamp = tuple[tuple[str, int, int], ...]


def take_stamp(paths: Iterable[Path]) -> Stamp:
    """Return name, size and time (ns) of the files, and of the files in the folders, among ``paths``."""
    return tuple(entry for path in paths for entry in _iter_entries(path))


def status_files(run: RunDir) -> list[Path]:
    """Return what decides about the state of a run and its attempts, besides the scheduler."""
    attempts = run.attempts()
    newest = [path for a in attempts[-1:] for path in (a.record, a.events, a.results)]
    return [run.spec, run.events, run.cancel_marker, run.attempts_folder, run.checkpoints, *newest]


def event_files(attempt: AttemptDir) -> list[Path]:
    """Return what decides about the timeline of an attempt."""
    return [attempt.record, attempt.events]


def _iter_entries(path: Path) -> Iterator[tuple[str, int, int]]:
    try:
        info = path.stat()
        yield path.name, info.st_size, info.st_mtime_ns
        for entry in sorted(os.scandir(path), key=lambda e: e.name) if path.is_dir() else ():
            info = entry.stat()
            yield f"{path.name}/{entry.name}", info.st_size, info.st_mtime_ns
    except OSError:  # missing, or deleted meanwhile
        yield path.name, -1, -1
