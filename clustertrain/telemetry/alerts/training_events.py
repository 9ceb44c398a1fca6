"""Warnings of rank 0 as alerts. They are read from its events file because agent and ranks share only files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clustertrain import fsio, reading
from clustertrain.run import events
from clustertrain.telemetry.alerts.gate import AlertFinding
from clustertrain.telemetry.findings import CRITICAL, WARNING

READ_INTERVAL_S = 10.0
MAX_BYTES = 1 << 20  # per reading; the file grows by a line every few minutes
EVENT = "training_warning"
_CRITICAL = frozenset({"non_finite"})


class TrainingEventReader:
    """Incremental reader of the events of rank 0 in one attempt. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._next_read_s = float("-inf")

    def read(self, mono: float) -> Iterator[AlertFinding]:
        """Yield the new warnings, at most every READ_INTERVAL_S; an unreadable file is retried later."""
        if mono < self._next_read_s:
            return
        self._next_read_s = mono + READ_INTERVAL_S
        for event in events.filter_valid(self._read_new_events()):
            if event["event"] == EVENT and isinstance(event.get("code"), str):
                yield AlertFinding(
                    code=event["code"],
                    severity=CRITICAL if event["code"] in _CRITICAL else WARNING,
                    text=f"step {event.get('step', '?')}: {event.get('text', event['code'])}",
                    fix=_as_str(event.get("fix")),
                    rank=0,
                    value=_as_float(event.get("value")),
                    limit=_as_float(event.get("limit")),
                    one_shot=True,
                )

    def _read_new_events(self) -> list[events.Event]:
        try:
            with reading.open_regular(self._path) as f:
                f.seek(self._offset)
                data = f.read(MAX_BYTES)
        except OSError:
            return []
        complete_lines = data.rpartition(b"\n")[0]
        self._offset += len(complete_lines) + (1 if complete_lines else 0)
        return fsio.parse_records(complete_lines.splitlines())


def _as_float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _as_str(value: object) -> str | None:
    return value if isinstance(value, str) else None
