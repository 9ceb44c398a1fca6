"""Rank 0's rows and events in the run folder, in the formats of ``clustertrain/run``.

A thread writes them, so that a shared filesystem never delays a step.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from typing import Any

from .guard import guarded
from .rank import Rank

_FLUSH_S = 1.0


class Records:
    """Writer of the rows of ``metrics/attempt-<n>.jsonl`` and of the attempt's events."""

    def __init__(self, rank: Rank) -> None:
        self._rows_path = os.path.join(rank.run_dir, "metrics", f"attempt-{rank.attempt}.jsonl")
        self._events_path = os.path.join(rank.attempt_dir, "events", f"hooks-rank-{rank.rank}.jsonl")
        self._pid = os.getpid()
        self._rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._flush_until_end, name="clustertrain-records", daemon=True)
        self._thread.start()
        atexit.register(self.flush)

    def add_row(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._rows.append(row)

    def write_event(self, event: str, **fields: Any) -> None:
        """Append an event durably, after the rows before it."""
        self.flush()
        record = {
            "t": time.time(), "monotonic_s": time.monotonic(), "host": socket.gethostname(), "pid": os.getpid(),
            "event": event, **fields,
        }  # fmt: skip
        _append(self._events_path, [record], sync=True)

    def flush(self) -> None:
        if os.getpid() != self._pid:  # the exit of a forked child
            return
        with self._lock:
            rows, self._rows = self._rows, []
            if rows:
                _append(self._rows_path, rows)

    def _flush_until_end(self) -> None:
        flush = guarded(self.flush)
        while not self._wake.wait(_FLUSH_S):
            flush()


def _append(path: str, records: list[dict[str, Any]], *, sync: bool = False) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    data = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in records).encode()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    try:
        while data:
            data = data[os.write(fd, data) :]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
