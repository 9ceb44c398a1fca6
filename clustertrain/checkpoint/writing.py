"""The process that writes one rank's checkpoints: ``python -m clustertrain.checkpoint.writing FD ENGINE``.

It takes jobs from the pipe until that ends, which is when its rank does, however that comes about. What it was given
until then it brings to an end: the state of a rank that was killed while its save was under way is not lost.
"""

from __future__ import annotations

import mmap
import os
import queue
import sys
import threading
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from clustertrain import clock
from clustertrain.checkpoint.background import Abandon, Memory, Message, Outcome, perform
from clustertrain.checkpoint.engines import engine
from clustertrain.checkpoint.trouble import Trouble
from clustertrain.checkpoint.writer import Commit, Write

# How long the other ranks' parts are waited for when one's own rank is gone: they may well be gone too.
ORPHAN_S = 20.0


class Inbox:
    """What the rank sends, read by a thread, so that it never waits for a write to end before it can send more."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._jobs: queue.SimpleQueue[Write | Commit | None] = queue.SimpleQueue()
        self._abandoned: set[int] = set()
        self._memory: dict[int, mmap.mmap] = {}
        self._orphaned_at: float | None = None
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def orphaned(self) -> bool:
        return self._orphaned_at is not None

    def next_job(self) -> Write | Commit | None:
        """Waits for it. None: there will be none."""
        return self._jobs.get()

    def memory(self, index: int) -> memoryview:
        return memoryview(self._memory[index])

    def wanted(self, step: int) -> bool:
        if self._orphaned_at is not None and clock.monotonic() - self._orphaned_at > ORPHAN_S:
            return False
        return step not in self._abandoned

    def _read(self) -> None:
        try:
            while True:
                message = msgspec.json.decode(self._pipe.recv_bytes(), type=Message)
                if isinstance(message, Memory):
                    fd = reduction.recv_handle(self._pipe)
                    self._memory[message.index] = mmap.mmap(fd, message.size, access=mmap.ACCESS_READ)
                    os.close(fd)
                elif isinstance(message, Abandon):
                    self._abandoned.add(message.step)
                else:
                    self._jobs.put(message)
        except (EOFError, OSError):
            self._orphaned_at = clock.monotonic()
            self._jobs.put(None)


def main(fd: int, name: str) -> None:
    pipe: Connection[Any, Any] = Connection(fd)
    inbox = Inbox(pipe)
    engine(name)  # its imports, before there is anything to write
    while (job := inbox.next_job()) is not None:
        step = job.step
        try:
            memory = inbox.memory(job.memory) if isinstance(job, Write) else None
            done = perform(job, memory, lambda: inbox.wanted(step), lambda: not inbox.orphaned)  # noqa: B023
        except Exception as e:  # an engine's own failure must reach the rank, and not end in a log that nobody reads
            traceback.print_exc()
            why = f"writing failed: {type(e).__name__}: {e}"
            of = "write" if isinstance(job, Write) else "commit"
            done = Outcome(step=step, of=of, ended=clock.monotonic(), trouble=Trouble(why=why, of="storage"))  # type: ignore[arg-type]
        try:
            pipe.send_bytes(msgspec.json.encode(done))
        except OSError:
            continue  # the rank is gone; the commit that follows is still worth doing


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
