"""Event logs: JSON lines, one file per writer, merged by time on reading. Their schema: :mod:`.event_types`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from clustertrain import clock, fsio, settings
from clustertrain.run import endings, event_types, safe_names
from clustertrain.run.json_files import convert_leniently, has_type, is_number
from clustertrain.run.run_dir import AttemptDir, RunDir

Event = dict[str, Any]
"""An event as it was read, for code that only shows it; :func:`select` returns structs."""
E = TypeVar("E", bound=event_types.Event)


class WriteEvent(Protocol):
    """A function with the interface of :meth:`EventLog.write`."""

    def __call__(self, event: str, /, **fields: object) -> object: ...


class EventLog:
    """The events file of one writer."""

    def __init__(self, path: Path) -> None:
        self._appender = fsio.JsonlAppender(path)
        self._host = socket.gethostname()

    def write(self, event: str, /, **fields: object) -> Event:
        """Append one event durably: the next process that reads may be the one that decides about the run.

        ``fields`` are those of the event's struct in :mod:`.event_types`. A full or absent disk does not raise: the
        record of an action must not prevent the action.
        """
        record = {
            "t": clock.now(),
            "monotonic_s": clock.monotonic(),
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


def log_user_event(run: RunDir, event: str, /, **fields: object) -> None:
    """Append an event of what the user asked for by a command."""
    with fsio.group_umask(run.path):
        log = EventLog(run.events / f"{event}-{socket.gethostname()}-{os.getpid()}.jsonl")
    log.write(event, user=settings.user_name(), **fields)
    log.close()


_FIELD_TYPES = event_types.collect_field_types()
_MAX_TIMESTAMP = 253402300800.0  # the year 10000, beyond Python's calendar


def filter_valid(records: Iterable[Event]) -> list[Event]:
    """Return the records that are events, without fields of a wrong type: another version may have written them."""
    valid = []
    for record in records:
        t, name = record.get("t"), record.get("event")
        if not (isinstance(name, str) and is_timestamp(t)):
            continue
        event = {k: v for k, v in record.items() if k not in _FIELD_TYPES or has_type(v, _FIELD_TYPES[k])}
        safe_names.sanitize(event)
        if name == "ended" and "ending" in event:
            event["ending"] = endings.current_name(event["ending"])
        if name != "checkpoint" or "step" in event:  # the event is useless without it
            valid.append(event)
    return valid


def is_timestamp(value: object) -> bool:
    """Return whether ``value`` is a UTC epoch time (s) within the years of a calendar."""
    return is_number(value) and 0 <= value < _MAX_TIMESTAMP


def _load_merged(files: Iterable[Path]) -> list[Event]:
    events = filter_valid(e for path in sorted(files) for e in fsio.read_jsonl(path))
    return sorted(events, key=lambda e: float(e["t"]))


def _list_files(folder: Path) -> list[Path]:
    """Return the event logs in ``folder``. Not with glob, which takes an unreadable folder for an empty one."""
    try:
        return [p for p in folder.iterdir() if p.suffix == ".jsonl"]
    except (FileNotFoundError, NotADirectoryError):
        return []


def for_attempt(attempt: AttemptDir) -> list[Event]:
    """Return all events of one attempt, by wall time."""
    return _load_merged(_list_files(attempt.events))


def for_run(run: RunDir) -> list[Event]:
    """Return the events that belong to no attempt."""
    return _load_merged(_list_files(run.events))


def filter_by_name(events: Iterable[Event], name: object) -> Iterator[Event]:
    return (e for e in events if e["event"] == name)


def find_last(events: Iterable[Event], name: str) -> Event | None:
    matches = list(filter_by_name(events, name))
    return matches[-1] if matches else None


def select(events: Iterable[Event], event_type: type[E]) -> Iterator[E]:
    """Yield the events of one type as structs."""
    for event in filter_by_name(events, event_type.__struct_config__.tag):
        typed = convert_leniently(event, event_type)
        if typed is not None:
            yield typed


def select_last(events: Iterable[Event], event_type: type[E]) -> E | None:
    """Return the last event of one type as a struct."""
    matches = list(filter_by_name(events, event_type.__struct_config__.tag))
    return next(select(reversed(matches), event_type), None)


def to_struct(event: Event) -> event_types.Event | None:
    """Return an event as a struct; None if this version does not know its name."""
    event_type = event_types.EVENTS.get(event["event"])
    return None if event_type is None else convert_leniently(event, event_type)
