"""The saves of this rank that are under way, and what the process that writes says of them. Nothing here is
collective."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from clustertrain import clock
from clustertrain.checkpoint.core.failures import Failure
from clustertrain.checkpoint.save.commit import CommitJob, WriteJob
from clustertrain.checkpoint.save.staging import StagingBuffer
from clustertrain.checkpoint.save.writer_client import JobOutcome, JobRunner, WriterClient, WriterDied

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0  # while it waits, for how long it may
DEADLINE_MESSAGE = "it would not have been there before this process must end"
COPY_FAILURE_TIMEOUT_S = 600.0  # copies have failed for so long when nobody waits for them any more


@dataclass
class PendingSave:
    """A save under way on this rank; ``commit`` on rank 0 alone. ``send_thread`` is a thread that waits for a GPU."""

    write: WriteJob
    commit: CommitJob | None
    staging: StagingBuffer
    started: float
    stall_s: float = 0.0
    send_thread: threading.Thread | None = None
    written: JobOutcome | None = None
    committed: JobOutcome | None = None
    is_in_local_tier: bool = False  # on the node's own disk, and no more needed in memory
    is_retried: bool = False

    @property
    def step(self) -> int:
        return self.write.step

    def is_done(self) -> bool:
        """Whether this rank's processes have said all that they will."""
        return self.written is not None and (self.commit is None or self.committed is not None)

    @property
    def failure(self) -> Failure | None:
        for outcome in (self.written, self.committed):
            if outcome is not None and outcome.trouble is not None:
                return outcome.trouble
        return None

    @property
    def is_sending(self) -> bool:
        return self.send_thread is not None and self.send_thread.is_alive()

    def fail(self, failure: Failure) -> None:
        outcome = JobOutcome(step=self.step, of="write", ended=clock.monotonic(), trouble=failure)
        self.written = self.written or outcome
        if self.commit is not None:
            self.committed = self.committed or outcome

    def on_outcome(self, outcome: JobOutcome) -> None:
        if outcome.of == "keep":
            self.is_in_local_tier = True
            self.write = msgspec.structs.replace(self.write, memory=None)
        elif outcome.of == "write":
            self.written = outcome
        else:
            self.committed = outcome


class PendingSaves:
    """``waiting`` has them, the oldest first."""

    def __init__(
        self,
        worker: JobRunner,
        get_deadline: Callable[[], float | None],
        on_copy: Callable[[JobOutcome], None],
        *,
        has_remote: bool,
    ) -> None:
        """``get_deadline`` says when waiting ends, by the monotonic clock; ``has_remote``: of what is committed some
        are made."""
        self.worker = worker
        self.waiting: deque[PendingSave] = deque()
        self._get_deadline = get_deadline
        self._on_copy = on_copy
        self._has_remote = has_remote
        self._copied_upto = -1  # step up to which there is nothing left to copy
        self._copies_failing_since: float | None = None  # of copies

    def begin(self, pending: PendingSave) -> None:
        self.waiting.append(pending)
        if pending.failure is not None:  # told to the others when they land
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
        except Exception as e:  # also of a thread: nobody would hear of it, and wait for an answer for ever
            pending.fail(Failure(why=f"{type(e).__name__}: {e}", of="storage"))

    def wait_until(self, pending: PendingSave, condition: Callable[[], bool]) -> None:
        """Until it is ``condition``, or has failed because it is too late."""
        while not condition():
            deadline = self._get_deadline()
            remaining_s = POLL_INTERVAL_S if deadline is None else min(POLL_INTERVAL_S, deadline - clock.monotonic())
            if remaining_s <= 0:
                self.worker.abort_commit(pending.step)
                pending.fail(Failure(why=DEADLINE_MESSAGE, of="deadline"))
            elif pending.is_sending and pending.send_thread is not None:
                pending.send_thread.join(remaining_s)
            elif not self._take_outcome(remaining_s) and not self.worker.is_alive:
                self._resubmit(WriterDied("the process that writes checkpoints is gone"))

    def wait_until_free(self, staging: StagingBuffer) -> bool:
        """Wait until nothing in the memory is needed any more; False: it was still in use at the deadline."""
        is_free = True
        for pending in self.waiting:
            if pending.staging is staging:
                self.wait_until(pending, lambda: pending.is_in_local_tier or pending.written is not None)  # noqa: B023
                is_free = is_free and (pending.is_in_local_tier or not _is_late(pending.written))
        return is_free

    def poll_outcomes(self) -> None:
        """What has been said so far; does not wait."""
        while (self.waiting or self._has_remote) and self._take_outcome(0.0):
            pass

    def drain(self, deadline: float, *, join: bool) -> None:
        """Hear what is said ``deadline`` then; with ``join`` wait for the threads that send, however long they take."""
        while self.waiting and not self.waiting[-1].is_done() and (remaining_s := deadline - clock.monotonic()) > 0:
            self._take_outcome(remaining_s)
        for pending in self.waiting:
            if pending.send_thread is not None:
                pending.send_thread.join(None if join else 0.0)

    def is_in_use(self, staging: StagingBuffer) -> bool:
        """Whether a thread may still be at work in the memory."""
        return any(p.staging is staging and p.is_sending for p in self.waiting)

    def _take_outcome(self, timeout_s: float | None) -> bool:
        """Take one outcome; False: there was none in time."""
        try:
            outcome = self.worker.next_outcome(timeout_s)
        except WriterDied as e:
            self._resubmit(e)
            return True
        if outcome is None:
            return False
        if outcome.of == "copy":
            self._on_copy_outcome(outcome)
            return True
        for pending in self.waiting:
            if pending.step == outcome.step:
                pending.on_outcome(outcome)
        return True

    def _resubmit(self, e: WriterDied) -> None:
        """Another process goes on with what the dead one left, once: its memory is still there."""
        for pending in self.waiting:
            if pending.is_done() or pending.is_sending:
                continue
            if not pending.is_retried:
                log.warning("%s; another one goes on with step %d", e, pending.step)
                pending.is_retried = True
                self._send(pending)
                continue
            pending.fail(Failure(why=f"{e}, twice", of="storage"))

    # -- copies

    def _on_copy_outcome(self, outcome: JobOutcome) -> None:
        if outcome.trouble is not None:
            self._copies_failing_since = self._copies_failing_since or outcome.ended
            self._on_copy(outcome)
            return
        self._copies_failing_since = None
        if outcome.bytes:
            self._on_copy(outcome)
        else:
            self._copied_upto = max(self._copied_upto, outcome.step)

    def wait_for_copies(self, newest: int, should_continue: Callable[[], bool]) -> bool:
        """Wait until what is committed up to step ``newest`` is copied; as
        :meth:`CheckpointManager.wait_for_copies`."""
        restarts_left = 1
        while self._has_remote and self._copied_upto < newest:
            if isinstance(self.worker, WriterClient) and not self.worker.is_alive:
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
        """Beyond step ``newest`` nothing is committed any more."""
        self._copied_upto = min(self._copied_upto, newest)


def _is_late(outcome: JobOutcome | None) -> bool:
    return outcome is not None and outcome.trouble is not None and outcome.trouble.of == "deadline"
