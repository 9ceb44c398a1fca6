"""The writer process of one rank: ``python -m clustertrain.checkpoint.save.writer_process FD PID ENGINE``.

It takes jobs from the pipe until the pipe closes, which happens however its rank ends, and finishes the jobs it has. A
save that was staged when its rank was killed is therefore not lost.
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
from clustertrain.checkpoint.core.failures import Failure
from clustertrain.checkpoint.save import node_local
from clustertrain.checkpoint.save.engines import get_engine
from clustertrain.checkpoint.save.job_executor import perform
from clustertrain.checkpoint.save.remote import Uploader
from clustertrain.checkpoint.save.writer_jobs import (
    AbortCommit,
    AttachBuffer,
    CommitJob,
    JobOutcome,
    UploadJob,
    WriteJob,
    WriterMessage,
    job_kind,
)

# Seconds to wait for the other ranks' parts after this process's rank is gone: the others may be gone too.
ORPHAN_TIMEOUT_S = 20.0


class Inbox:
    """The rank's messages, read by a thread so that the rank can always send more without waiting for a write."""

    def __init__(self, pipe: Connection[Any, Any], rank_pid: int) -> None:
        self._pipe = pipe
        self._rank_pid = rank_pid
        self._jobs: queue.SimpleQueue[WriteJob | CommitJob | None] = queue.SimpleQueue()
        self._local_writer: LocalTierWriter | None = None
        self._uploader: Uploader | None = None
        self._idle = threading.Event()
        self._aborted_steps: set[int] = set()
        self._buffers: dict[int, mmap.mmap] = {}
        self._send_lock = threading.Lock()
        self._orphaned_at: float | None = None
        threading.Thread(target=self._read_messages, daemon=True).start()

    @property
    def is_orphaned(self) -> bool:
        """Whether the rank has ended. A child that it forked may still hold its end of the pipe open."""
        if self._orphaned_at is None and os.getppid() != self._rank_pid:
            self._orphaned_at = clock.monotonic()
        return self._orphaned_at is not None

    def next_job(self) -> WriteJob | CommitJob | None:
        """Wait for the next job and return it, or None after the last one."""
        self._idle.set()
        job = self._jobs.get()
        self._idle.clear()
        return job

    def finish_job(self, job: WriteJob | CommitJob, outcome: JobOutcome) -> None:
        if self._local_writer is not None:
            self._local_writer.finish_job(job)
        if self._uploader is not None and outcome.failure is None and (isinstance(job, CommitJob) or job.rank != 0):
            self._uploader.notify_saved(job.step)
        self.send(outcome)

    def protected_steps(self) -> Collection[int]:
        return () if self._uploader is None else self._uploader.protected_steps()

    def close(self) -> None:
        if self._uploader is not None:
            with suppress(OSError):
                self._uploader.announce_end()
            sys.stderr.flush()
            os._exit(0)  # a library's threads may be waiting for a server

    def buffer(self, index: int) -> memoryview:
        return memoryview(self._buffers[index])

    def should_continue(self, step: int) -> bool:
        if self.is_orphaned and clock.monotonic() - (self._orphaned_at or 0.0) > ORPHAN_TIMEOUT_S:
            return False
        return step not in self._aborted_steps

    def _read_messages(self) -> None:
        try:
            while True:
                while not self._pipe.poll(1.0):
                    if self.is_orphaned:
                        return
                message = schema.decode(self._pipe.recv_bytes(), WriterMessage)
                if isinstance(message, AttachBuffer):
                    fd = reduction.recv_handle(self._pipe)
                    self._buffers[message.index] = mmap.mmap(fd, message.size, access=mmap.ACCESS_READ)
                    os.close(fd)
                elif isinstance(message, AbortCommit):
                    self._aborted_steps.add(message.step)
                elif isinstance(message, UploadJob) and self._uploader is None:
                    self._uploader = Uploader(message, self.send, self._idle.wait)
                    self._uploader.start()
                elif isinstance(message, WriteJob | CommitJob):
                    self._aborted_steps.discard(message.step)
                    self._enqueue(message)
        except (EOFError, OSError):
            pass
        except Exception:  # the thread's edge: the process must end, because its rank waits for an outcome
            traceback.print_exc()
        finally:
            self._orphaned_at = self._orphaned_at or clock.monotonic()
            if self._uploader is not None:
                self._uploader.stop()
            self._enqueue(None)

    def _enqueue(self, job: WriteJob | CommitJob | None) -> None:
        if self._local_writer is None and isinstance(job, WriteJob) and job.local_folder:
            self._local_writer = LocalTierWriter(self, self._jobs)
        if self._local_writer is not None:
            self._local_writer.jobs.put(job)
        else:
            self._jobs.put(job)

    def send(self, outcome: JobOutcome) -> None:
        """Send ``outcome`` to the rank. Do nothing if the rank has ended, because the other jobs still count."""
        with self._send_lock, suppress(OSError):
            self._pipe.send_bytes(msgspec.json.encode(outcome))


class LocalTierWriter:
    """A thread that writes parts to the node's own disk while earlier parts are copied to the shared folder.

    It starts with the first part that has a local folder. From then on all jobs pass through it, to stay in order.
    """

    def __init__(self, inbox: Inbox, next_queue: queue.SimpleQueue[WriteJob | CommitJob | None]) -> None:
        self._inbox = inbox
        self._next_queue = next_queue
        self._in_use: set[str] = set()
        self.jobs: queue.SimpleQueue[WriteJob | CommitJob | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            job = self.jobs.get()
            if (
                isinstance(job, WriteJob)
                and job.local_folder
                and job.buffer_index is not None
                and self._write_local(job)
            ):
                self._inbox.send(JobOutcome(step=job.step, kind="local_write", ended=clock.monotonic()))
                job = msgspec.structs.replace(job, buffer_index=None)
            self._next_queue.put(job)

    def _write_local(self, job: WriteJob) -> bool:
        assert job.buffer_index is not None
        self._in_use.add(job.local_folder)
        try:
            return node_local.write_local_part(job, self._inbox.buffer(job.buffer_index), self._in_use)
        except Exception:  # the thread's edge: the job then writes to the shared folder and reports its own failures
            traceback.print_exc()
            return False

    def finish_job(self, job: WriteJob | CommitJob) -> None:
        if isinstance(job, WriteJob):
            self._in_use.discard(job.local_folder)


def main(fd: int, rank_pid: int, engine_name: str) -> None:
    """Run the jobs that arrive on ``fd`` from the rank ``rank_pid``."""
    inbox = Inbox(Connection(fd), rank_pid)
    get_engine(engine_name)  # import its libraries before the first job
    while (job := inbox.next_job()) is not None:
        try:
            memory = (
                inbox.buffer(job.buffer_index) if isinstance(job, WriteJob) and job.buffer_index is not None else None
            )
            should_continue = functools.partial(inbox.should_continue, job.step)
            outcome = perform(job, memory, should_continue, lambda: not inbox.is_orphaned, inbox.protected_steps)
        except Exception as e:  # the process's edge: an engine's bug must reach the rank
            traceback.print_exc()
            failure = Failure(message=f"writing failed: {type(e).__name__}: {e}", kind="storage")
            outcome = JobOutcome(step=job.step, kind=job_kind(job), ended=clock.monotonic(), failure=failure)
        inbox.finish_job(job, outcome)
    inbox.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
