"""What rank 0 warns of, on its way to where alerts go: read from its events, since the agent has no other word of the
ranks than files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clustertrain import fsio, reading
from clustertrain.run import events
from clustertrain.telemetry.alerts.gate import CRITICAL, WARNING, Finding

LOOK_S = 10.0
MOST_BYTES = 1 << 20  # at a time; the file has a line every few minutes
EVENT = "training_warning"
_CRITICAL = frozenset({"non_finite"})


class Training:
    """Reads on in the events of rank 0 of one attempt. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._next = float("-inf")

    def read(self, mono: float) -> Iterator[Finding]:
        """What was written since, where it is time to look again. A file that cannot be read now is read later."""
        if mono < self._next:
            return
        self._next = mono + LOOK_S
        for event in events.sound(self._new()):
            if event["event"] == EVENT and isinstance(event.get("code"), str):
                yield Finding(
                    code=event["code"],
                    severity=CRITICAL if event["code"] in _CRITICAL else WARNING,
                    text=f"step {event.get('step', '?')}: {event.get('text', event['code'])}",
                    fix=_word(event.get("fix")),
                    rank=0,
                    value=_number(event.get("value")),
                    limit=_number(event.get("limit")),
                    moment=True,
                )

    def _new(self) -> list[events.Event]:
        try:
            with reading.opened(self._path) as f:
                f.seek(self._at)
                data = f.read(MOST_BYTES)
        except OSError:
            return []
        whole = data.rpartition(b"\n")[0]
        self._at += len(whole) + (1 if whole else 0)
        return fsio.records(whole.splitlines())


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None
