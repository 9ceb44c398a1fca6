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
from clustertrain.checkpoint.core.failures import Failure, failure_from_exception
from clustertrain.checkpoint.save import commit, node_local
from clustertrain.checkpoint.save.commit import CommitJob, WriteJob
from clustertrain.checkpoint.save.remote import UploadJob
from clustertrain.errors import CheckpointError

if TYPE_CHECKING:  # it imports torch
    from clustertrain.checkpoint.save.staging import StagingBuffer

CLOSE_TIMEOUT_S = 1.0
LOCK_TIMEOUT_S = 1.0
# What ends a job reaches every process of it. The writer ends with its rank, when its work is done.
_BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class AttachBuffer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The staging buffer number ``index``; its file descriptor follows."""

    index: int
    size: int


class AbortCommit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give up the commit of ``step``."""

    step: int


JobKind = Literal["keep", "write", "commit", "copy"]
Message = AttachBuffer | WriteJob | CommitJob | AbortCommit | UploadJob


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """``ended`` is by the monotonic clock, which is the machine's. "keep": a part is in the node's own folder, and the
    memory that it was staged in is free. "copy": see :class:`~clustertrain.checkpoint.save.remote.UploadOutcome`."""

    step: int
    of: JobKind
    bytes: int = 0
    seconds: float = 0.0
    ended: float
    trouble: Failure | None = None


def perform(
    job: WriteJob | CommitJob,
    memory: memoryview | None,
    should_continue: Callable[[], bool],
    can_prune: Callable[[], bool],
    get_protected: Callable[[], Collection[int]] = tuple,
) -> JobOutcome:
    """Do a job and say how it went. A part that is not in ``memory`` is in the node's own folder."""
    job_kind: Literal["write", "commit"] = "write" if isinstance(job, WriteJob) else "commit"
    try:
        if isinstance(job, WriteJob):
            size = commit.write_and_mark_done(job, memory) if memory is not None else node_local.copy_to_shared(job)
        else:
            size = commit.commit(job, should_continue, can_prune, get_protected)
    except (OSError, CheckpointError) as e:
        return JobOutcome(step=job.step, of=job_kind, ended=clock.monotonic(), trouble=failure_from_exception(e))
    return JobOutcome(step=job.step, of=job_kind, bytes=size, ended=clock.monotonic())


class JobRunner(Protocol):
    """Where jobs are done, in the order in which they come."""

    def submit(self, job: WriteJob | CommitJob, staging: StagingBuffer | None) -> None: ...

    def abort_commit(self, step: int) -> None: ...

    @property
    def is_alive(self) -> bool:
        """Whether there is somebody to do a job, as far as is known."""
        ...

    def next_outcome(self, timeout_s: float | None) -> JobOutcome | None:
        """The next one. None: there is none within the timeout (None: for ever).

        Raises:
            WriterDied: with jobs unanswered; they may be submitted again.
        """
        ...

    def close(self) -> None: ...


class WriterDied(Exception):
    """The process that writes is gone; the message says how."""


class InlineRunner:
    """In this process, while it waits."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[WriteJob | CommitJob, StagingBuffer | None]] = deque()
        self._aborted_steps: set[int] = set()

    def submit(self, job: WriteJob | CommitJob, staging: StagingBuffer | None) -> None:
        self._jobs.append((job, staging))

    def abort_commit(self, step: int) -> None:
        self._aborted_steps.add(step)

    @property
    def is_alive(self) -> bool:
        return bool(self._jobs)

    def next_outcome(self, timeout_s: float | None) -> JobOutcome | None:
        if not self._jobs or timeout_s == 0:
            return None
        job, staging = self._jobs.popleft()
        memory = staging.memory() if staging is not None else None
        return perform(job, memory, lambda: job.step not in self._aborted_steps, lambda: True)

    def close(self) -> None:
        self._jobs.clear()


class WriterClient:
    """A process of its own, started with :meth:`start` before it is needed, or with the first job."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None
        self._lock = threading.RLock()  # a thread that waits for a GPU sends too
        self._sent_generations: dict[int, int] = {}  # by buffer, which memory the process has
        self._upload_job: UploadJob | None = None

    def start(self) -> None:
        with self._lock:
            if self._process is None:
                self._start_process()

    def _start_process(self) -> None:
        parent_end, child_end = Pipe()
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)  # a child has the mask of its parent
        try:
            self._process = subprocess.Popen(
                proc.python_module_argv(
                    sys.executable,
                    "clustertrain.checkpoint.save.writer_process",
                    *map(str, (child_end.fileno(), os.getpid())),
                    self._engine,
                ),
                pass_fds=(child_end.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
            child_end.close()
        self._pipe = parent_end
        self._sent_generations = {}
        if self._upload_job is not None:
            self._send(self._upload_job)

    def submit(self, job: WriteJob | CommitJob, staging: StagingBuffer | None) -> None:
        with self._lock, suppress(OSError):  # it has died; outcome() tells
            self.start()
            buffer_index = job.memory if isinstance(job, WriteJob) else None
            if (
                staging is not None
                and buffer_index is not None
                and self._sent_generations.get(buffer_index) != staging.generation
            ):
                assert staging.fd is not None and self._process is not None and self._pipe is not None
                self._send(AttachBuffer(index=buffer_index, size=staging.size))
                reduction.send_handle(self._pipe, staging.fd, self._process.pid)
                self._sent_generations[buffer_index] = staging.generation
            self._send(job)

    def abort_commit(self, step: int) -> None:
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            return  # a thread waits for a process that takes nothing any more
        try:
            if self._pipe is not None:  # else it has died, and its commit with it
                with suppress(OSError):
                    self._send(AbortCommit(step=step))
        finally:
            self._lock.release()

    def start_upload(self, job: UploadJob) -> None:
        """From now on, also by a process that takes over."""
        with self._lock, suppress(OSError):
            self._upload_job = job
            if self._pipe is None:
                self.start()
            else:
                self._send(job)

    @property
    def is_alive(self) -> bool:
        """As far as it was noticed."""
        return self._pipe is not None

    def _send(self, message: Message) -> None:
        assert self._pipe is not None
        self._pipe.send_bytes(msgspec.json.encode(message))

    def next_outcome(self, timeout_s: float | None) -> JobOutcome | None:
        if self._pipe is None:
            return None
        try:
            if not self._pipe.poll(timeout_s):
                return None
            return schema.decode(self._pipe.recv_bytes(), JobOutcome)
        except (EOFError, OSError) as e:
            exit_text = self._reap()
            raise WriterDied(f"the process that writes checkpoints {exit_text}") from e

    def _reap(self) -> str:
        with self._lock:
            return self._reap_locked()

    def _reap_locked(self) -> str:
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
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # it is left on purpose: subprocess shall not warn of it
        self._process = self._pipe = None
