"""Events: JSON lines, one file a writer, merged by time on reading. Their names and fields: docs/architecture.md."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clustertrain import clock, fsio
from clustertrain.run import safe_names
from clustertrain.run.json_files import has_type, is_number
from clustertrain.run.run_dir import AttemptDir, RunDir

Event = dict[str, Any]


class EventLog:
    """The events file of one writer."""

    def __init__(self, path: Path) -> None:
        self._appender = fsio.JsonlAppender(path)
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


# What readers reckon with or look into. The other fields are only shown.
_NUMBER_FIELDS = (
    "t_begin", "mono", "pid", "index", "step", "to_step", "last_step", "samples", "at", "total", "restart",
    "world_size", "rank", "xid", "count", "restore_s", "stall_s", "save_s", "eval_s",
)  # fmt: skip
_STRING_FIELDS = (
    "job_id", "backend", "host", "node", "uuid", "device", "ending", "reason", "how", "why", "code",
    "severity", "state", "text",
)  # fmt: skip
_FIELD_TYPES: dict[str, type] = {
    **dict.fromkeys(_NUMBER_FIELDS, float),
    **dict.fromkeys(_STRING_FIELDS, str),
    **dict.fromkeys(("nodes", "gpus", "exclude"), list),
    "options": dict,
}
_MAX_TIMESTAMP = 253402300800.0  # the year 10000, which no calendar of Python's has


def filter_valid(records: Iterable[Event]) -> list[Event]:
    """Those that are events, each without the fields that are not of their kind: what is in a file may be of another
    version, or of another hand."""
    valid = []
    for record in records:
        t, name = record.get("t"), record.get("event")
        if not (isinstance(name, str) and is_timestamp(t)):
            continue
        event = {k: v for k, v in record.items() if k not in _FIELD_TYPES or has_type(v, _FIELD_TYPES[k])}
        safe_names.sanitize(event)
        if name != "checkpoint" or "step" in event:  # without it nobody could tell which one it was
            valid.append(event)
    return valid


def is_timestamp(value: Any) -> bool:
    """UTC epoch s that a calendar has."""
    return is_number(value) and 0 <= value < _MAX_TIMESTAMP


def _load_merged(files: Iterable[Path]) -> list[Event]:
    events = filter_valid(e for path in sorted(files) for e in fsio.read_jsonl(path))
    return sorted(events, key=lambda e: float(e["t"]))


def _list_files(folder: Path) -> list[Path]:
    """Not with glob, which takes a folder that may not be read for an empty one."""
    try:
        return [p for p in folder.iterdir() if p.suffix == ".jsonl"]
    except (FileNotFoundError, NotADirectoryError):
        return []


def for_attempt(attempt: AttemptDir) -> list[Event]:
    """All events of one attempt, by wall time."""
    return _load_merged(_list_files(attempt.events))


def for_run(run: RunDir) -> list[Event]:
    """Events that belong to no attempt."""
    return _load_merged(_list_files(run.events))


def filter_by_name(events: Iterable[Event], name: str) -> Iterator[Event]:
    return (e for e in events if e["event"] == name)


def find_last(events: Iterable[Event], name: str) -> Event | None:
    matches = list(filter_by_name(events, name))
    return matches[-1] if matches else None
