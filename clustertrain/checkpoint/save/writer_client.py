"""The rank's end of the writer process; :mod:`~clustertrain.checkpoint.save.writer_process` is the other end.

The writer shares memory and a pipe with its rank and is in no process group. It imports torch only if its engine does,
so it starts in a fraction of a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from clustertrain import proc, schema
from clustertrain.checkpoint.save.job_executor import perform
from clustertrain.checkpoint.save.writer_jobs import (
    AbortCommit,
    AttachBuffer,
    CommitJob,
    JobOutcome,
    UploadJob,
    WriteJob,
    WriterMessage,
)

if TYPE_CHECKING:  # it imports torch
    from clustertrain.checkpoint.save.staging import StagingBuffer

CLOSE_TIMEOUT_S = 1.0
LOCK_TIMEOUT_S = 1.0
# Slurm and torchrun signal every process of a job. The writer ignores them, and ends after its rank when its work is
# done.
_BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class JobRunner(Protocol):
    """A runner of jobs, in the order of their submission."""

    def start(self) -> None:
        """Start before the first job."""
        ...

    def submit(self, job: WriteJob | CommitJob, staging: StagingBuffer | None) -> None: ...

    def abort_commit(self, step: int) -> None: ...

    def start_upload(self, job: UploadJob) -> None: ...

    @property
    def is_alive(self) -> bool:
        """Whether the runner can run a job, as far as this process knows."""
        ...

    def next_outcome(self, timeout_s: float | None) -> JobOutcome | None:
        """Return the next outcome, or None after ``timeout_s`` (None: wait without a limit).

        Raises:
            WriterDied: jobs are left without an outcome; they may be submitted again.
        """
        ...

    def close(self) -> None: ...


class WriterDied(Exception):
    """The writer process died; the message says how."""


class InlineRunner:
    """A runner in this process, which runs a job when the caller waits for its outcome."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[WriteJob | CommitJob, StagingBuffer | None]] = deque()
        self._aborted_steps: set[int] = set()

    def start(self) -> None:
        """Do nothing: there is no process to start."""

    def submit(self, job: WriteJob | CommitJob, staging: StagingBuffer | None) -> None:
        self._jobs.append((job, staging))

    def abort_commit(self, step: int) -> None:
        self._aborted_steps.add(step)

    def start_upload(self, job: UploadJob) -> None:
        """Do nothing: only a writer process uploads."""

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
    """A runner in a writer process, which starts with :meth:`start` or with the first job."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None
        self._lock = threading.RLock()  # threads that wait for a GPU copy send too
        self._sent_generations: dict[int, int] = {}  # the generation that the process has, by buffer
        self._upload_job: UploadJob | None = None

    def start(self) -> None:
        with self._lock:
            if self._process is None:
                self._start_process()

    def _start_process(self) -> None:
        parent_end, child_end = Pipe()
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)  # a child inherits the mask
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
        with self._lock, suppress(OSError):  # it has died; next_outcome() raises
            self.start()
            buffer_index = job.buffer_index if isinstance(job, WriteJob) else None
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
            return  # a thread is blocked on a process that no longer reads
        try:
            if self._pipe is not None:  # otherwise the commit has died with the process
                with suppress(OSError):
                    self._send(AbortCommit(step=step))
        finally:
            self._lock.release()

    def start_upload(self, job: UploadJob) -> None:
        """Start uploads in the process, and in each process that replaces it."""
        with self._lock, suppress(OSError):
            self._upload_job = job
            if self._pipe is None:
                self.start()
            else:
                self._send(job)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; False only after its death was noticed."""
        return self._pipe is not None

    def _send(self, message: WriterMessage) -> None:
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
            raise WriterDied(f"the checkpoint writer {exit_text}") from e

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
        """Close the pipe. The writer ends after its last job, possibly after this process."""
        if self._pipe is None or self._process is None:
            return
        self._pipe.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # left running on purpose; keeps subprocess from warning
        self._process = self._pipe = None
