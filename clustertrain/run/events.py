"""Events: JSON lines, one file a writer, merged by time on reading. Their names and fields: docs/architecture.md."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clustertrain import clock, fsio
from clustertrain.run.folder import AttemptDir, RunDir

Event = dict[str, Any]


class EventLog:
    """The events file of one writer."""

    def __init__(self, path: Path) -> None:
        self._appender = fsio.Appender(path)
        self._host = socket.gethostname()

    def write(self, event: str, **fields: Any) -> Event:
        """Append one event, durably: the next process to look may be the one that decides about the run.

        A full or absent disk does not raise: the record of a deed must not keep it from being done.
        """
        record = {
            "t": clock.now(),
            "mono": clock.monotonic(),
            "host": self._host,
            "pid": os.getpid(),
            "event": event,
            **fields,
        }
        try:
            self._appender.append(record, sync=True)
        except OSError as e:
            print(f"clustertrain: event not recorded ({e}): {record}", file=sys.stderr, flush=True)
        return record

    def close(self) -> None:
        self._appender.close()


def _merge(files: Iterable[Path]) -> list[Event]:
    events = [e for path in sorted(files) for e in fsio.read_lines(path) if "event" in e and "t" in e]
    return sorted(events, key=lambda e: float(e["t"]))


def _files(folder: Path) -> list[Path]:
    """Not with glob, which takes a folder that may not be read for an empty one."""
    try:
        return [p for p in folder.iterdir() if p.suffix == ".jsonl"]
    except (FileNotFoundError, NotADirectoryError):
        return []


def of_attempt(attempt: AttemptDir) -> list[Event]:
    """All events of one attempt, by wall time."""
    return _merge(_files(attempt.events))


def of_run(run: RunDir) -> list[Event]:
    """Events that belong to no attempt."""
    return _merge(_files(run.events))


def named(events: Iterable[Event], name: str) -> Iterator[Event]:
    return (e for e in events if e["event"] == name)


def last(events: Iterable[Event], name: str) -> Event | None:
    found = list(named(events, name))
    return found[-1] if found else None
