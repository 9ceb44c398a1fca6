"""Heartbeats: a few numbers that a rank writes to a file on its node, which the agent reads once per second.

The file is in the agent's temporary folder, never on the shared filesystem. A write is one copy into mapped memory, a
few microseconds. A reader detects a half-written heartbeat by comparing the counts at its two ends.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import msgspec

# In the order of their codes. "idle": before the session starts and after it ends.
PHASES = ("idle", "startup", "restore", "train", "checkpoint", "evaluation", "shutdown")
IDLE, STARTUP, RESTORE, TRAIN, CHECKPOINT, EVALUATION, SHUTDOWN = range(len(PHASES))


def phase_name(code: int) -> str:
    return PHASES[code] if 0 <= code < len(PHASES) else "unknown"


_RECORD = struct.Struct("<QqqddddqQ")  # count, values, count


class Heartbeat(msgspec.Struct):
    """The state of a rank. ``tokens``, ``data_wait_s`` and ``forward_s`` are sums over the steps of this process."""

    step: int = 0
    """Completed optimizer steps."""
    phase: int = IDLE
    """Index into :data:`PHASES`."""
    tokens: float = 0.0
    """Tokens of each step divided by world_size, under every layout, so that the sum over all ranks is the run's."""
    data_wait_s: float = 0.0
    """Time spent waiting for the session's loaders."""
    forward_s: float = float("nan")
    """Time of the forward passes alone, without waiting for other ranks; NaN if the layout has collectives in them, or
    the script does not use ``session.train_step``."""
    t: float = 0.0
    """Start of the last step (CLOCK_MONOTONIC, s)."""
    pid: int = 0


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"beat-{rank}"


class HeartbeatWriter:
    """Writer of one rank's heartbeat. It never raises: a full or missing temporary folder must not end a run."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.beat = Heartbeat(pid=os.getpid())
        self._count = 0
        self._map: mmap.mmap | None = None
        try:
            fd = os.open(heartbeat_path(folder, rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _RECORD.size)  # a write into a hole of a full disk would be a SIGBUS
                self._map = mmap.mmap(fd, _RECORD.size)
            finally:
                os.close(fd)
        except (OSError, ValueError):
            self._map = None

    def write(self) -> None:
        """Publish :attr:`beat` as it is now."""
        if self._map is None:
            return
        b = self.beat
        self._count += 1
        values = (b.step, b.phase, b.tokens, b.data_wait_s, b.forward_s, b.t, b.pid)
        _RECORD.pack_into(self._map, 0, self._count, *values, self._count)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


class HeartbeatReader:
    """Reader of the heartbeats of a node's ranks."""

    def __init__(self, folder: Path, ranks: list[int]) -> None:
        self._paths = {rank: str(heartbeat_path(folder, rank)) for rank in ranks}

    def read(self) -> dict[int, Heartbeat]:
        """Return the heartbeats by global rank, without those that do not exist yet or cannot be read."""
        beats = {}
        for rank, path in self._paths.items():
            beat = _read_heartbeat(path)
            if beat is not None:
                beats[rank] = beat
        return beats


def _read_heartbeat(path: str) -> Heartbeat | None:
    for _ in range(3):  # a heartbeat may be half written
        try:
            fd = os.open(path, os.O_RDONLY)  # path.read_bytes() takes several times as long
        except OSError:
            return None
        try:
            data = os.read(fd, _RECORD.size)
        except OSError:
            return None
        finally:
            os.close(fd)
        if len(data) < _RECORD.size:
            return None
        count, step, phase, tokens, data_wait_s, forward_s, t, pid, end_count = _RECORD.unpack_from(data)
        if count and count == end_count:
            return Heartbeat(step, phase, tokens, data_wait_s, forward_s, t, pid)
    return None
