"""What a rank says of itself while it runs: a few numbers in a file of its node's, which the agent reads once a second.

The file lies in the agent's temporary folder, never on the shared filesystem. Writing is one copy into mapped memory,
some microseconds; a reader may see a beat half written, which the doubled count tells.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import msgspec

# In the order of their codes. "idle" is before the session starts and after it ends.
PHASES = ("idle", "startup", "restore", "train", "checkpoint", "evaluation", "shutdown")
IDLE, STARTUP, RESTORE, TRAIN, CHECKPOINT, EVALUATION, SHUTDOWN = range(len(PHASES))


def phase_name(code: int) -> str:
    return PHASES[code] if 0 <= code < len(PHASES) else "unknown"


_RECORD = struct.Struct("<QqqddddqQ")  # the count, the figures, the count again


class Heartbeat(msgspec.Struct):
    """``step``: optimizer steps done; ``phase``: a code of PHASES; ``t``: when the last step began, CLOCK_MONOTONIC s;
    ``pid``: the rank's process.

    The others are summed over the steps that this process has done. ``tokens``: of each step's the world_size-th part,
    whatever the layout, so that the sum over all ranks is the run's. ``data_wait_s``: for the session's loaders.
    ``forward_s``: of the forward passes alone, without waiting for another rank; NaN where the layout has collectives
    in them, or the script does its steps without ``session.train_step``."""

    step: int = 0
    phase: int = IDLE
    tokens: float = 0.0
    data_wait_s: float = 0.0
    forward_s: float = float("nan")
    t: float = 0.0
    pid: int = 0


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"beat-{rank}"


class HeartbeatWriter:
    """The beat of one rank. Never raises: a temporary folder that is full or gone must not end a training run."""

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
    """The beats of a node's ranks, read again and again."""

    def __init__(self, folder: Path, ranks: list[int]) -> None:
        self._paths = {rank: str(heartbeat_path(folder, rank)) for rank in ranks}

    def read(self) -> dict[int, Heartbeat]:
        """By global rank; without those that have not begun, or could not be read."""
        beats = {}
        for rank, path in self._paths.items():
            beat = _read_heartbeat(path)
            if beat is not None:
                beats[rank] = beat
        return beats


def _read_heartbeat(path: str) -> Heartbeat | None:
    for _ in range(3):  # one that was being written
        try:
            fd = os.open(path, os.O_RDONLY)  # not path.read_bytes(), which takes several times as long
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
