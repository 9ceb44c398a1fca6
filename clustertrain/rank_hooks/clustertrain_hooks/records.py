"""Rank 0's rows and events in the run folder, in the formats of ``clustertrain/run``.

A thread writes them, so that a shared filesystem never delays a step.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from typing import Any

from .guard import guarded
from .rank import Rank

_FLUSH_S = 1.0


class Records:
    """Writer of the rows of ``metrics/attempt-<n>.jsonl`` and of the attempt's events."""

    def __init__(self, rank: Rank) -> None:
        self.totals: dict[str, float] = {}
        """Running sums of the attempt's earlier rows, which another program of the same rank has written."""
        self._rows_path = self._begin_file(os.path.join(rank.run_dir, "metrics"), rank.attempt)
        self._events_path = os.path.join(rank.attempt_dir, "events", f"hooks-rank-{rank.rank}.jsonl")
        self._pid = os.getpid()
        self._rows: list[dict[str, Any]] = []
        self._lock, self._write_lock = threading.Lock(), threading.Lock()
        self._thread = threading.Thread(target=self._flush_forever, name="clustertrain-records", daemon=True)
        self._thread.start()
        atexit.register(guarded(self.flush))

    def _begin_file(self, folder: str, attempt: int) -> str:
        """Return the path of the next file of rows: steps rise within a file, and each program has its own."""
        number, path = 0, os.path.join(folder, f"attempt-{attempt}.jsonl")
        while os.path.exists(path) and os.path.getsize(path):
            self.totals = _read_last_row(path)
            number += 1
            path = os.path.join(folder, f"attempt-{attempt}-{number}.jsonl")
        return path

    def add_row(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._rows.append(row)

    def write_event(self, event: str, **fields: Any) -> None:
        """Append an event durably, after the rows before it.

        A full disk does not raise: on this rank alone it would end a hook that the other ranks wait for.
        """
        record = {
            "t": time.time(), "monotonic_s": time.monotonic(), "host": socket.gethostname(), "pid": os.getpid(),
            "event": event, **fields,
        }  # fmt: skip
        try:
            self.flush()
            _append(self._events_path, [record], sync=True)
        except OSError as e:
            print(f"clustertrain: event not recorded ({e}): {record}", file=sys.stderr, flush=True)

    def flush(self) -> None:
        if os.getpid() != self._pid:  # the exit of a forked child
            return
        with self._write_lock:
            with self._lock:  # not during the write: a step must not wait for a shared filesystem
                rows, self._rows = self._rows, []
            try:
                if rows:
                    _append(self._rows_path, rows)
            except OSError:
                with self._lock:
                    self._rows = rows + self._rows
                raise

    def _flush_forever(self) -> None:
        is_said = False
        while True:
            time.sleep(_FLUSH_S)
            try:
                self.flush()
            except OSError as e:  # a full disk: tried again
                if not is_said:
                    print(f"clustertrain: rows are not written yet: {e}", file=sys.stderr, flush=True)
                is_said = True


def _read_last_row(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().splitlines()
    try:
        row = json.loads(lines[-1])
    except ValueError:  # torn by a kill
        return {}
    return row if isinstance(row, dict) else {}


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
