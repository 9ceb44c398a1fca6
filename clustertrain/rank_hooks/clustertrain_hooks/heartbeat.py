"""The heartbeat of a rank: the record of ``clustertrain/run/heartbeat.py``, in a file of the rank folder."""

from __future__ import annotations

import math
import mmap
import os
import struct
import time

# count, step, phase, tokens, data_wait_s, forward_s, t, pid, count
_RECORD = struct.Struct("<QqqddddqQ")
IDLE, STARTUP, RESTORE, TRAIN, CHECKPOINT, EVALUATION, SHUTDOWN = range(7)


class Heartbeat:
    """Writer of one rank's heartbeat. It never raises: a full temporary folder must not end a program."""

    def __init__(self, rank_dir: str, rank: int) -> None:
        self.step, self.phase, self.data_wait_s, self.step_began = 0, STARTUP, 0.0, time.monotonic()
        self._count = 0
        self._pid = os.getpid()
        self._map: mmap.mmap | None = None
        try:
            fd = os.open(os.path.join(rank_dir, f"beat-{rank}"), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _RECORD.size)  # a write into a hole of a full disk would be a SIGBUS
                self._map = mmap.mmap(fd, _RECORD.size)
            finally:
                os.close(fd)
        except (OSError, ValueError):
            pass

    def write(self) -> None:
        if self._map is None:
            return
        self._count += 1
        _RECORD.pack_into(
            self._map, 0, self._count, self.step, self.phase, 0.0, self.data_wait_s, math.nan, self.step_began,
            self._pid, self._count,
        )  # fmt: skip

    def close(self) -> None:
        self.phase = IDLE
        self.write()
