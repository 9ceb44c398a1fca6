"""The process that writes one rank's checkpoints.

``python -m clustertrain.checkpoint.save.writer_process FD PID ENGINE``.

It takes jobs from the pipe until that ends, which is when its rank does, however that comes about. What it was given
until then it brings to an end: the state of a rank that was killed while its save was under way is not lost.
"""

from __future__ import annotations

import functools
import mmap
import os
import queue
import sys
import threading
import traceback
from collections.abc import Collection
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from clustertrain import clock, schema
from clustertrain.checkpoint.core.failures import Trouble
from clustertrain.checkpoint.save import node_local
from clustertrain.checkpoint.save.commit import Commit, Write
from clustertrain.checkpoint.save.engines import engine
from clustertrain.checkpoint.save.remote import Copied, Upload, Uploader
from clustertrain.checkpoint.save.writer_client import Abandon, Memory, Message, Outcome, perform

# How long the other ranks' parts are waited for when one's own rank is gone: they may well be gone too.
ORPHAN_S = 20.0


class Inbox:
    """What the rank sends, read by a thread, so that it never waits for a write to end before it can send more."""

    def __init__(self, pipe: Connection[Any, Any], rank_pid: int) -> None:
        self._pipe = pipe
        self._rank_pid = rank_pid
        self._jobs: queue.SimpleQueue[Write | Commit | None] = queue.SimpleQueue()
        self._keeper: Keeper | None = None
        self._uploader: Uploader | None = None
        self._idle = threading.Event()
        self._abandoned: set[int] = set()
        self._memory: dict[int, mmap.mmap] = {}
        self._sending = threading.Lock()
        self._orphaned_at: float | None = None
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def orphaned(self) -> bool:
        """Whether the rank is gone. Its end of the pipe may be held open by a child that it forked."""
        if self._orphaned_at is None and os.getppid() != self._rank_pid:
            self._orphaned_at = clock.monotonic()
        return self._orphaned_at is not None

    def next_job(self) -> Write | Commit | None:
        """Waits for it. None: there will be none."""
        self._idle.set()
        job = self._jobs.get()
        self._idle.clear()
        return job

    def done(self, job: Write | Commit, outcome: Outcome) -> None:
        if self._keeper is not None:
            self._keeper.done(job)
        if self._uploader is not None and outcome.trouble is None and (isinstance(job, Commit) or job.rank != 0):
            self._uploader.saved(job.step)
        self.send(outcome)

    def spared(self) -> Collection[int]:
        return () if self._uploader is None else self._uploader.spared()

    def close(self) -> None:
        if self._uploader is not None:
            with suppress(OSError):
                self._uploader.say_over()
            sys.stderr.flush()
            os._exit(0)  # a library's threads may be waiting for a server

    def memory(self, index: int) -> memoryview:
        return memoryview(self._memory[index])

    def wanted(self, step: int) -> bool:
        if self.orphaned and clock.monotonic() - (self._orphaned_at or 0.0) > ORPHAN_S:
            return False
        return step not in self._abandoned

    def _read(self) -> None:
        try:
            while True:
                while not self._pipe.poll(1.0):
                    if self.orphaned:
                        return
                message = schema.decode(self._pipe.recv_bytes(), Message)
                if isinstance(message, Memory):
                    fd = reduction.recv_handle(self._pipe)
                    self._memory[message.index] = mmap.mmap(fd, message.size, access=mmap.ACCESS_READ)
                    os.close(fd)
                elif isinstance(message, Abandon):
                    self._abandoned.add(message.step)
                elif isinstance(message, Upload) and self._uploader is None:
                    self._uploader = Uploader(message, self._copied, self._idle.wait)
                    self._uploader.begin()
                elif isinstance(message, Write | Commit):
                    self._abandoned.discard(message.step)
                    self._put(message)
        except (EOFError, OSError):
            pass
        except Exception:  # whatever it is, the process must end: its rank waits for an answer
            traceback.print_exc()
        finally:
            self._orphaned_at = self._orphaned_at or clock.monotonic()
            if self._uploader is not None:
                self._uploader.end()
            self._put(None)

    def _copied(self, c: Copied) -> None:
        outcome = Outcome(
            step=c.step, of="copy", bytes=c.bytes, seconds=c.seconds, ended=clock.monotonic(), trouble=c.trouble
        )
        self.send(outcome)

    def _put(self, job: Write | Commit | None) -> None:
        if self._keeper is None and isinstance(job, Write) and job.local:
            self._keeper = Keeper(self, self._jobs)
        if self._keeper is not None:
            self._keeper.jobs.put(job)
        else:
            self._jobs.put(job)

    def send(self, outcome: Outcome) -> None:
        """Nobody may be there any more: what follows is still worth doing."""
        with self._sending, suppress(OSError):
            self._pipe.send_bytes(msgspec.json.encode(outcome))


class Keeper:
    """Puts parts into the node's own folder, while earlier ones are still being copied to the shared one. It is there
    as soon as there is one, and all jobs pass it, so that they stay in order."""

    def __init__(self, inbox: Inbox, then: queue.SimpleQueue[Write | Commit | None]) -> None:
        self._inbox = inbox
        self._then = then
        self._busy: set[str] = set()
        self.jobs: queue.SimpleQueue[Write | Commit | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            job = self.jobs.get()
            if isinstance(job, Write) and job.local and job.memory is not None and self._kept(job):
                self._inbox.send(Outcome(step=job.step, of="keep", ended=clock.monotonic()))
                job = msgspec.structs.replace(job, memory=None)
            self._then.put(job)

    def _kept(self, job: Write) -> bool:
        assert job.memory is not None
        self._busy.add(job.local)
        try:
            return node_local.keep(job, self._inbox.memory(job.memory), self._busy)
        except Exception:  # the job itself tells what is wrong, when it is done without this
            traceback.print_exc()
            return False

    def done(self, job: Write | Commit) -> None:
        if isinstance(job, Write):
            self._busy.discard(job.local)


def main(fd: int, rank_pid: int, name: str) -> None:
    inbox = Inbox(Connection(fd), rank_pid)
    engine(name)  # its imports, before there is anything to write
    while (job := inbox.next_job()) is not None:
        try:
            memory = inbox.memory(job.memory) if isinstance(job, Write) and job.memory is not None else None
            wanted = functools.partial(inbox.wanted, job.step)
            done = perform(job, memory, wanted, lambda: not inbox.orphaned, inbox.spared)
        except Exception as e:  # an engine's own failure must reach the rank, and not end in a log that nobody reads
            traceback.print_exc()
            why = f"writing failed: {type(e).__name__}: {e}"
            of = "write" if isinstance(job, Write) else "commit"
            done = Outcome(step=job.step, of=of, ended=clock.monotonic(), trouble=Trouble(why=why, of="storage"))  # type: ignore[arg-type]
        inbox.done(job, done)
    inbox.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
