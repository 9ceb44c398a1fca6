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
from clustertrain.checkpoint.core.failures import Trouble
from clustertrain.checkpoint.save.commit import Commit, Write
from clustertrain.checkpoint.save.staging import Staging
from clustertrain.checkpoint.save.writer_client import Background, Outcome, Worker, WriterDied

log = logging.getLogger(__name__)

LOOK_S = 1.0  # while it waits, for how long it may
LATE = "it would not have been there before this process must end"
FAILING_S = 600.0  # copies have failed for so long when nobody waits for them any more


@dataclass
class Flight:
    """A save under way on this rank; ``commit`` on rank 0 alone. ``sending`` is a thread that waits for a GPU."""

    write: Write
    commit: Commit | None
    staging: Staging
    started: float
    stall_s: float = 0.0
    sending: threading.Thread | None = None
    written: Outcome | None = None
    committed: Outcome | None = None
    kept: bool = False  # on the node's own disk, and no more needed in memory
    retried: bool = False

    @property
    def step(self) -> int:
        return self.write.step

    def answered(self) -> bool:
        """Whether this rank's processes have said all that they will."""
        return self.written is not None and (self.commit is None or self.committed is not None)

    @property
    def trouble(self) -> Trouble | None:
        for outcome in (self.written, self.committed):
            if outcome is not None and outcome.trouble is not None:
                return outcome.trouble
        return None

    @property
    def is_being_sent(self) -> bool:
        return self.sending is not None and self.sending.is_alive()

    def fail(self, trouble: Trouble) -> None:
        failed = Outcome(step=self.step, of="write", ended=clock.monotonic(), trouble=trouble)
        self.written = self.written or failed
        if self.commit is not None:
            self.committed = self.committed or failed

    def hear(self, outcome: Outcome) -> None:
        if outcome.of == "keep":
            self.kept = True
            self.write = msgspec.structs.replace(self.write, memory=None)
        elif outcome.of == "write":
            self.written = outcome
        else:
            self.committed = outcome


class Flights:
    """``waiting`` has them, the oldest first."""

    def __init__(
        self,
        worker: Worker,
        until: Callable[[], float | None],
        on_copy: Callable[[Outcome], None],
        *,
        copies: bool,
    ) -> None:
        """``until`` says when waiting ends, by the monotonic clock; ``copies``: of what is committed some are made."""
        self.worker = worker
        self.waiting: deque[Flight] = deque()
        self._until = until
        self._on_copy = on_copy
        self._copies = copies
        self._copied = -1  # step up to which there is nothing left to copy
        self._failing_since: float | None = None  # of copies

    def begin(self, flight: Flight) -> None:
        self.waiting.append(flight)
        if flight.trouble is not None:  # told to the others when they land
            return
        if flight.staging.asynchronous:
            flight.sending = threading.Thread(target=self._send, args=(flight,), daemon=True)
            flight.sending.start()
        else:
            self._send(flight)

    def _send(self, flight: Flight) -> None:
        try:
            flight.staging.ready()
            if flight.written is None:
                self.worker.submit(flight.write, flight.staging)
            if flight.commit is not None and flight.committed is None:
                self.worker.submit(flight.commit, None)
        except Exception as e:  # also of a thread: nobody would hear of it, and wait for an answer for ever
            flight.fail(Trouble(why=f"{type(e).__name__}: {e}", of="storage"))

    def wait_for(self, flight: Flight, done: Callable[[], bool]) -> None:
        """Until it is ``done``, or has failed because it is too late."""
        while not done():
            until = self._until()
            left = LOOK_S if until is None else min(LOOK_S, until - clock.monotonic())
            if left <= 0:
                self.worker.abandon(flight.step)
                flight.fail(Trouble(why=LATE, of="deadline"))
            elif flight.is_being_sent and flight.sending is not None:
                flight.sending.join(left)
            elif not self._take(left) and not self.worker.alive:
                self._again(WriterDied("the process that writes checkpoints is gone"))

    def free(self, staging: Staging) -> bool:
        """Wait until nothing in the memory is needed any more; False: it was still in use at the deadline."""
        free = True
        for before in self.waiting:
            if before.staging is staging:
                self.wait_for(before, lambda: before.kept or before.written is not None)  # noqa: B023
                free = free and (before.kept or not _is_late(before.written))
        return free

    def hear(self) -> None:
        """What has been said so far; does not wait."""
        while (self.waiting or self._copies) and self._take(0.0):
            pass

    def end(self, until: float, *, join: bool) -> None:
        """Hear what is said ``until`` then; with ``join`` wait for the threads that send, however long they take."""
        while self.waiting and not self.waiting[-1].answered() and (left := until - clock.monotonic()) > 0:
            self._take(left)
        for flight in self.waiting:
            if flight.sending is not None:
                flight.sending.join(None if join else 0.0)

    def needs(self, staging: Staging) -> bool:
        """Whether a thread may still be at work in the memory."""
        return any(f.staging is staging and f.is_being_sent for f in self.waiting)

    def _take(self, timeout_s: float | None) -> bool:
        """Take one outcome; False: there was none in time."""
        try:
            outcome = self.worker.outcome(timeout_s)
        except WriterDied as e:
            self._again(e)
            return True
        if outcome is None:
            return False
        if outcome.of == "copy":
            self._hear_of_copy(outcome)
            return True
        for flight in self.waiting:
            if flight.step == outcome.step:
                flight.hear(outcome)
        return True

    def _again(self, e: WriterDied) -> None:
        """Another process goes on with what the dead one left, once: its memory is still there."""
        for flight in self.waiting:
            if flight.answered() or flight.is_being_sent:
                continue
            if not flight.retried:
                log.warning("%s; another one goes on with step %d", e, flight.step)
                flight.retried = True
                self._send(flight)
                continue
            flight.fail(Trouble(why=f"{e}, twice", of="storage"))

    # -- copies

    def _hear_of_copy(self, outcome: Outcome) -> None:
        if outcome.trouble is not None:
            self._failing_since = self._failing_since or outcome.ended
            self._on_copy(outcome)
            return
        self._failing_since = None
        if outcome.bytes:
            self._on_copy(outcome)
        else:
            self._copied = max(self._copied, outcome.step)

    def await_copies(self, newest: int, go_on: Callable[[], bool]) -> bool:
        """Wait until what is committed up to step ``newest`` is copied; as :meth:`CheckpointManager.await_copies`."""
        tries = 1
        while self._copies and self._copied < newest:
            if isinstance(self.worker, Background) and not self.worker.alive:
                if not tries:
                    return False
                tries -= 1
                self.worker.start()
            failing_s = 0.0 if self._failing_since is None else clock.monotonic() - self._failing_since
            if failing_s > FAILING_S or not go_on():
                return False
            self._take(0.2)
        return True

    def no_longer_copied(self, newest: int) -> None:
        """Beyond step ``newest`` nothing is committed any more."""
        self._copied = min(self._copied, newest)


def _is_late(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.trouble is not None and outcome.trouble.of == "deadline"
