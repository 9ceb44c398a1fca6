"""This rank's pending saves, and the outcomes that its writer reports. Nothing here is collective."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from clustertrain import clock
from clustertrain.checkpoint.core.failures import Failure
from clustertrain.checkpoint.save.staging import StagingBuffer
from clustertrain.checkpoint.save.writer_client import JobRunner, WriterDied
from clustertrain.checkpoint.save.writer_jobs import CommitJob, JobOutcome, WriteJob

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0  # between checks of the deadline while waiting
DEADLINE_MESSAGE = "it would not have been committed before this process must end"
COPY_FAILURE_TIMEOUT_S = 600.0  # after uploads have failed for this long, the end of the run no longer waits for them


@dataclass
class PendingSave:
    """A save whose outcome some ranks do not know yet."""

    write: WriteJob
    commit: CommitJob | None
    """None except on rank 0."""
    staging: StagingBuffer
    started: float
    """Monotonic time at which the save began."""
    stall_s: float = 0.0
    """Seconds for which training waited."""
    send_thread: threading.Thread | None = None
    """The thread that waits for the copy from the GPU and then submits the jobs."""
    written: JobOutcome | None = None
    committed: JobOutcome | None = None
    is_in_local_tier: bool = False
    """Whether the part is on the node's own disk, so that its staging buffer is free."""
    is_retried: bool = False

    @property
    def step(self) -> int:
        return self.write.step

    def is_done(self) -> bool:
        """Return whether all jobs of this rank have an outcome."""
        return self.written is not None and (self.commit is None or self.committed is not None)

    @property
    def failure(self) -> Failure | None:
        for outcome in (self.written, self.committed):
            if outcome is not None and outcome.failure is not None:
                return outcome.failure
        return None

    @property
    def is_sending(self) -> bool:
        return self.send_thread is not None and self.send_thread.is_alive()

    def fail(self, failure: Failure) -> None:
        """Set ``failure`` as the outcome of the jobs that have none."""
        outcome = JobOutcome(step=self.step, kind="write", ended=clock.monotonic(), failure=failure)
        self.written = self.written or outcome
        if self.commit is not None:
            self.committed = self.committed or outcome

    def on_outcome(self, outcome: JobOutcome) -> None:
        if outcome.kind == "local_write":
            self.is_in_local_tier = True
            self.write = msgspec.structs.replace(self.write, buffer_index=None)
        elif outcome.kind == "write":
            self.written = outcome
        else:
            self.committed = outcome


class PendingSaves:
    """The pending saves of this rank, whose jobs ``worker`` runs."""

    def __init__(
        self,
        worker: JobRunner,
        get_save_deadline: Callable[[], float | None],
        on_copy: Callable[[JobOutcome], None],
        *,
        has_remote: bool,
    ) -> None:
        """
        Args:
            get_save_deadline: returns the monotonic time at which waiting ends.
            on_copy: called with the outcome of each upload.
            has_remote: whether the worker uploads checkpoints.
        """
        self.worker = worker
        self.waiting: deque[PendingSave] = deque()  # oldest first
        self._get_save_deadline = get_save_deadline
        self._on_copy = on_copy
        self._has_remote = has_remote
        self._copied_upto = -1  # newest step up to which nothing is left to upload
        self._copies_failing_since: float | None = None

    def begin(self, pending: PendingSave) -> None:
        """Queue ``pending`` and submit its jobs, from a thread while its copy from the GPU is in flight."""
        self.waiting.append(pending)
        if pending.failure is not None:  # the ranks exchange it when they finish this save
            return
        if pending.staging.is_async:
            pending.send_thread = threading.Thread(target=self._send, args=(pending,), daemon=True)
            pending.send_thread.start()
        else:
            self._send(pending)

    def _send(self, pending: PendingSave) -> None:
        try:
            pending.staging.synchronize()
            if pending.written is None:
                self.worker.submit(pending.write, pending.staging)
            if pending.commit is not None and pending.committed is None:
                self.worker.submit(pending.commit, None)
        except Exception as e:  # a thread's edge: without a report the rank would wait for the outcome forever
            pending.fail(Failure(message=f"{type(e).__name__}: {e}", kind="storage"))

    def wait_until(self, pending: PendingSave, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` holds; at the deadline, fail ``pending`` first."""
        while not condition():
            deadline = self._get_save_deadline()
            remaining_s = POLL_INTERVAL_S if deadline is None else min(POLL_INTERVAL_S, deadline - clock.monotonic())
            if remaining_s <= 0:
                self.worker.abort_commit(pending.step)
                pending.fail(Failure(message=DEADLINE_MESSAGE, kind="deadline"))
            elif pending.is_sending and pending.send_thread is not None:
                pending.send_thread.join(remaining_s)
            elif not self._take_outcome(remaining_s) and not self.worker.is_alive:
                self._resubmit(WriterDied("the checkpoint writer is gone"))

    def wait_until_free(self, staging: StagingBuffer) -> bool:
        """Wait until no save needs ``staging``. Return False if one still does at the deadline."""
        is_free = True
        for pending in self.waiting:
            if pending.staging is staging:
                self.wait_until(pending, lambda: pending.is_in_local_tier or pending.written is not None)  # noqa: B023
                is_free = is_free and (pending.is_in_local_tier or not _is_late(pending.written))
        return is_free

    def poll_outcomes(self) -> None:
        """Take the outcomes that have arrived, without waiting."""
        while (self.waiting or self._has_remote) and self._take_outcome(0.0):
            pass

    def drain(self, deadline: float, *, join: bool) -> None:
        """Take outcomes until the monotonic time ``deadline``.

        With ``join``, wait for the send threads without a limit.
        """
        while self.waiting and not self.waiting[-1].is_done() and (remaining_s := deadline - clock.monotonic()) > 0:
            self._take_outcome(remaining_s)
        for pending in self.waiting:
            if pending.send_thread is not None:
                pending.send_thread.join(None if join else 0.0)

    def is_in_use(self, staging: StagingBuffer) -> bool:
        """Return whether a thread may still be using ``staging``."""
        return any(p.staging is staging and p.is_sending for p in self.waiting)

    def _take_outcome(self, timeout_s: float | None) -> bool:
        """Take one outcome. Return False if there was none within ``timeout_s``."""
        try:
            outcome = self.worker.next_outcome(timeout_s)
        except WriterDied as e:
            self._resubmit(e)
            return True
        if outcome is None:
            return False
        if outcome.kind == "upload":
            self._on_copy_outcome(outcome)
            return True
        for pending in self.waiting:
            if pending.step == outcome.step:
                pending.on_outcome(outcome)
        return True

    def _resubmit(self, e: WriterDied) -> None:
        """Give the unfinished jobs to a new writer, once per save: the staged state is still in memory."""
        for pending in self.waiting:
            if pending.is_done() or pending.is_sending:
                continue
            if not pending.is_retried:
                log.warning("%s; a new one continues with step %d", e, pending.step)
                pending.is_retried = True
                self._send(pending)
                continue
            pending.fail(Failure(message=f"{e}, twice", kind="storage"))

    # -- uploads

    def _on_copy_outcome(self, outcome: JobOutcome) -> None:
        if outcome.failure is not None:
            self._copies_failing_since = self._copies_failing_since or outcome.ended
            self._on_copy(outcome)
            return
        self._copies_failing_since = None
        if outcome.bytes:
            self._on_copy(outcome)
        else:
            self._copied_upto = max(self._copied_upto, outcome.step)

    def wait_for_copies(self, newest: int, should_continue: Callable[[], bool]) -> bool:
        """Wait until all checkpoints up to step ``newest`` are uploaded, and return whether they are.

        Waiting ends early when ``should_continue()`` is False, or uploads have failed for `COPY_FAILURE_TIMEOUT_S`.
        """
        restarts_left = 1
        while self._has_remote and self._copied_upto < newest:
            if not self.worker.is_alive:
                if not restarts_left:
                    return False
                restarts_left -= 1
                self.worker.start()
            failing_s = 0.0 if self._copies_failing_since is None else clock.monotonic() - self._copies_failing_since
            if failing_s > COPY_FAILURE_TIMEOUT_S or not should_continue():
                return False
            self._take_outcome(0.2)
        return True

    def limit_copied_upto(self, newest: int) -> None:
        """Forget uploads of checkpoints newer than step ``newest``: the run has rolled back."""
        self._copied_upto = min(self._copied_upto, newest)


def _is_late(outcome: JobOutcome | None) -> bool:
    return outcome is not None and outcome.failure is not None and outcome.failure.kind == "deadline"
