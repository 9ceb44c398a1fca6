"""The process that writes, as the training process sees it. :mod:`~clustertrain.checkpoint.save.writer_process` is its
own side.

It shares memory and a pipe with its rank and is in no process group. It imports no torch unless its engine does, so it
is there in a fraction of a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from clustertrain import clock, proc, schema
from clustertrain.checkpoint.core.failures import Trouble, told
from clustertrain.checkpoint.save import commit, node_local
from clustertrain.checkpoint.save.commit import Commit, Write
from clustertrain.checkpoint.save.remote import Upload
from clustertrain.errors import CheckpointError

if TYPE_CHECKING:  # it imports torch
    from clustertrain.checkpoint.save.staging import Staging

IDLE_ENDS_S = 1.0
BUSY_S = 1.0
# What ends a job reaches every process of it. The writer ends with its rank, when its work is done.
_HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Memory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The staging buffer number ``index``; its file descriptor follows."""

    index: int
    size: int


class Abandon(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give up the commit of ``step``."""

    step: int


Message = Memory | Write | Commit | Abandon | Upload


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``ended`` is by the monotonic clock, which is the machine's. "keep": a part is in the node's own folder, and the
    memory that it was staged in is free. "copy": see :class:`~clustertrain.checkpoint.save.remote.Copied`."""

    step: int
    of: Literal["keep", "write", "commit", "copy"]
    bytes: int = 0
    seconds: float = 0.0
    ended: float
    trouble: Trouble | None = None


def perform(
    job: Write | Commit,
    memory: memoryview | None,
    go_on: Callable[[], bool],
    may_prune: Callable[[], bool],
    spared: Callable[[], Collection[int]] = tuple,
) -> Outcome:
    """Do a job and say how it went. A part that is not in ``memory`` is in the node's own folder."""
    of: Literal["write", "commit"] = "write" if isinstance(job, Write) else "commit"
    try:
        if isinstance(job, Write):
            size = commit.write(job, memory) if memory is not None else node_local.hand_on(job)
        else:
            size = commit.commit(job, go_on, may_prune, spared)
    except (OSError, CheckpointError) as e:
        return Outcome(step=job.step, of=of, ended=clock.monotonic(), trouble=told(e))
    return Outcome(step=job.step, of=of, bytes=size, ended=clock.monotonic())


class Worker(Protocol):
    """Where jobs are done, in the order in which they come."""

    def submit(self, job: Write | Commit, staging: Staging | None) -> None: ...

    def abandon(self, step: int) -> None: ...

    @property
    def alive(self) -> bool:
        """Whether there is somebody to do a job, as far as is known."""
        ...

    def outcome(self, timeout_s: float | None) -> Outcome | None:
        """The next one. None: there is none within the timeout (None: for ever).

        Raises:
            WriterDied: with jobs unanswered; they may be submitted again.
        """
        ...

    def close(self) -> None: ...


class WriterDied(Exception):
    """The process that writes is gone; the message says how."""


class Inline:
    """In this process, while it waits."""

    def __init__(self) -> None:
        self._todo: deque[tuple[Write | Commit, Staging | None]] = deque()
        self._abandoned: set[int] = set()

    def submit(self, job: Write | Commit, staging: Staging | None) -> None:
        self._todo.append((job, staging))

    def abandon(self, step: int) -> None:
        self._abandoned.add(step)

    @property
    def alive(self) -> bool:
        return bool(self._todo)

    def outcome(self, timeout_s: float | None) -> Outcome | None:
        if not self._todo or timeout_s == 0:
            return None
        job, staging = self._todo.popleft()
        memory = staging.memory() if staging is not None else None
        return perform(job, memory, lambda: job.step not in self._abandoned, lambda: True)

    def close(self) -> None:
        self._todo.clear()


class Background:
    """A process of its own, started with :meth:`start` before it is needed, or with the first job."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None
        self._lock = threading.RLock()  # a thread that waits for a GPU sends too
        self._sent: dict[int, int] = {}  # by buffer, which memory the process has
        self._upload: Upload | None = None

    def start(self) -> None:
        with self._lock:
            if self._process is None:
                self._start()

    def _start(self) -> None:
        ours, theirs = Pipe()
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)  # a child has the mask of its parent
        try:
            self._process = subprocess.Popen(
                proc.python_module(
                    sys.executable,
                    "clustertrain.checkpoint.save.writer_process",
                    *map(str, (theirs.fileno(), os.getpid())),
                    self._engine,
                ),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            theirs.close()
        self._pipe = ours
        self._sent = {}
        if self._upload is not None:
            self._send(self._upload)

    def submit(self, job: Write | Commit, staging: Staging | None) -> None:
        with self._lock, suppress(OSError):  # it has died; outcome() tells
            self.start()
            number = job.memory if isinstance(job, Write) else None
            if staging is not None and number is not None and self._sent.get(number) != staging.generation:
                assert staging.fd is not None and self._process is not None and self._pipe is not None
                self._send(Memory(index=number, size=staging.size))
                reduction.send_handle(self._pipe, staging.fd, self._process.pid)
                self._sent[number] = staging.generation
            self._send(job)

    def abandon(self, step: int) -> None:
        if not self._lock.acquire(timeout=BUSY_S):
            return  # a thread waits for a process that takes nothing any more
        try:
            if self._pipe is not None:  # else it has died, and its commit with it
                with suppress(OSError):
                    self._send(Abandon(step=step))
        finally:
            self._lock.release()

    def upload(self, job: Upload) -> None:
        """From now on, also by a process that takes over."""
        with self._lock, suppress(OSError):
            self._upload = job
            if self._pipe is None:
                self.start()
            else:
                self._send(job)

    @property
    def alive(self) -> bool:
        """As far as it was noticed."""
        return self._pipe is not None

    def _send(self, message: Message) -> None:
        assert self._pipe is not None
        self._pipe.send_bytes(msgspec.json.encode(message))

    def outcome(self, timeout_s: float | None) -> Outcome | None:
        if self._pipe is None:
            return None
        try:
            if not self._pipe.poll(timeout_s):
                return None
            return schema.decode(self._pipe.recv_bytes(), Outcome)
        except (EOFError, OSError) as e:
            how = self._bury()
            raise WriterDied(f"the process that writes checkpoints {how}") from e

    def _bury(self) -> str:
        with self._lock:
            return self._buried()

    def _buried(self) -> str:
        assert self._process is not None and self._pipe is not None
        code = self._process.wait()
        self._pipe.close()
        self._process = self._pipe = None
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def close(self) -> None:
        """It ends by itself when what it was given is done: at once, or after this process."""
        if self._pipe is None or self._process is None:
            return
        self._pipe.close()
        try:
            self._process.wait(IDLE_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # it is left on purpose: subprocess shall not warn of it
        self._process = self._pipe = None
