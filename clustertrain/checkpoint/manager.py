"""Save and restore, all ranks together.

A save is a copy of the state into memory, for which the ranks wait, and a write to disk by processes of their own, for
which they do not. What became of it the ranks tell each other at the next save or at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clustertrain import clock
from clustertrain.checkpoint.core import fault_points
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.core.failures import TooLate, Trouble, error
from clustertrain.checkpoint.core.retention import Policy
from clustertrain.checkpoint.format import fence as fences
from clustertrain.checkpoint.format import folders
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.fence import Fence
from clustertrain.checkpoint.format.manifest import Metric, Reason
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.load.restore import Agree, Local, Made, Remote, Restored, Restoring
from clustertrain.checkpoint.load.rollback import Wanted
from clustertrain.checkpoint.save import node_local as near
from clustertrain.checkpoint.save.commit import Commit, Write
from clustertrain.checkpoint.save.global_plan import Share
from clustertrain.checkpoint.save.pending_saves import Flight, Flights
from clustertrain.checkpoint.save.planner import Offers
from clustertrain.checkpoint.save.remote import Upload
from clustertrain.checkpoint.save.staging import Staging
from clustertrain.checkpoint.save.writer_client import Background, Inline, Outcome
from clustertrain.errors import CheckpointError

__all__ = ["CheckpointManager", "Local", "Made", "Remote", "Restored", "Saved"]

log = logging.getLogger(__name__)

PATIENCE_S = 600.0  # for the slowest rank's part, from when rank 0 has written its own
CPU = torch.device("cpu")
KEEP = Policy()


@dataclass(frozen=True)
class Saved:
    """``stall_s``: what training waited for. ``save_s``: from the call to the commit. ``bytes``: of all files."""

    step: int
    path: Path
    bytes: int
    stall_s: float
    save_s: float
    reason: Reason = "interval"


class CheckpointManager:
    """Checkpoints in ``root``. Its methods are collective, all ranks call them together, but for :meth:`poll` and
    :meth:`close`.

    Host memory: one copy of the rank's part of the state, on a GPU two of them, so that one can be filled while the
    other is being written.
    """

    def __init__(
        self,
        root: Path,
        ranks: Ranks,
        *,
        attempt: str,
        layout: Mapping[str, Any],
        policy: Policy = KEEP,
        engine: str = "raw",
        background: bool = True,
        device: torch.device = CPU,
        sharers: int = 1,
        about: Mapping[str, Any] | None = None,
        local: Local | None = None,
        remote: Remote | None = None,
        fence: Fence | None = None,
        until: Callable[[], float | None] = lambda: None,
        on_commit: Callable[[Saved], None] = lambda saved: None,
        on_copy: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        """``on_commit`` is called on every rank, once a checkpoint, when this rank hears of it: rank 0 first;
        ``fence`` tells whether a newer attempt owns the run, after which nothing of ``root`` is changed any more;
        ``sharers`` is the number of ranks on this machine;
        ``until`` says when waiting ends, by the monotonic clock; it is asked again and again;
        ``on_copy`` on rank 0 when all of one is copied, and on a rank that could not copy its share. ``local`` and
        ``remote`` need ``background``."""
        self._root = root
        self._ranks = ranks
        self._offers = Offers(root, ranks, attempt)
        self._restoring = Restoring(root, ranks, attempt, local, remote, fence)
        self._fence = fence
        self._attempt = attempt
        self._layout = dict(layout)
        self._policy = policy
        self._engine = engine
        self._about = dict(about or {})
        self._given_up = False
        self._on_commit = on_commit
        self._remote = remote
        self._newest = 0  # step that is known to be committed
        buffers = 2 if device.type == "cuda" else 1
        self._stagings = [Staging(root, device, sharers * buffers) for _ in range(buffers)]
        self._local = local
        self._near_root = local.root if local is not None else None
        worker = Background(engine) if background else Inline()
        self._flights = Flights(worker, until, on_copy, copies=remote is not None)
        # With a disk of the node's own one more can be on its way, whose memory is free already.
        self._most_flights = len(self._stagings) + (local is not None)
        self._saves = 0
        self._heard: set[int] = set()

    def start(self) -> None:
        """Begin to start the process that writes, ahead of the first save. Not collective."""
        if isinstance(self._flights.worker, Background):
            self._flights.worker.start()

    def reserve(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None = None) -> None:
        """Make room for a save of ``state`` ahead of the first one, beside what goes on."""
        blocks = self._offers.blocks(state, rank_state or {}, failure=f"{self._root}: nothing can be saved")
        for staging in self._stagings:
            try:
                staging.reserve(blocks)
            except OSError as e:  # a save will say so, where there is one before the room is there
                log.warning("no room for a copy of the state yet: %s", e)

    # -- save

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
        *,
        reason: Reason = "interval",
        metric: Metric | None = None,
        wait: bool = False,
    ) -> Saved | None:
        """Begin to save, and with ``wait`` see it committed; returns what was saved then. Waits for an earlier save
        that is still under way and has the memory that this one needs. A committed checkpoint of the same step is
        replaced only by a committed one.

        Raises:
            TooLate: on every rank, when the time to wait was over. Nothing is known to be committed.
            TakenOver: on every rank, a newer attempt owns the run. Nothing was committed.
            StorageError: on every rank, when any of them could not write, this time or the last. Nothing was committed
                then, and the older checkpoints are as they were.
            CheckpointError: likewise, where the state is one that cannot be saved.
        """
        started = clock.monotonic()
        self._make_way(reason)
        fault_points.reached("before staging", self._ranks.rank)
        number = self._saves % len(self._stagings)
        self._saves += 1
        staging = self._stagings[number]
        late = not self._flights.free(staging)
        begun = self._offers.stage(
            staging, step, state, rank_state or {}, failure=_failure(self._root, step), late=late
        )
        folder, staged = begun.folder, begun.staged
        write = Write(
            step=step,
            folder=str(folder),
            rank=self._ranks.rank,
            engine=self._engine,
            memory=number,
            segments=staged if isinstance(staged, list) else [],
            own=begun.own,
            # What a stop or the end waits for goes where it counts.
            local=str(near.folder_of(self._near_root, folder.name)) if self._near_root and not wait else "",
        )
        commit = self._commit(step, folder, begun.share, reason, metric) if self._ranks.rank == 0 else None
        flight = Flight(write, commit, staging, started)
        if isinstance(staged, Trouble):
            flight.fail(staged)
        self._flights.begin(flight)
        flight.stall_s = clock.monotonic() - started
        if not (wait or isinstance(self._flights.worker, Inline)):
            return None
        return self.settle()

    def _make_way(self, reason: Reason) -> None:
        """Bring to an end what is under way, until there is room for one more."""
        while len(self._flights.waiting) >= self._most_flights:
            try:
                self._land()
            except TooLate:
                raise
            except CheckpointError as e:  # on all ranks alike
                if reason in ("interval", "best"):
                    raise
                log.warning("%s; what is saved now matters more", e)

    def _commit(self, step: int, folder: Path, share: Share, reason: Reason, metric: Metric | None) -> Commit:
        return Commit(
            step=step,
            folder=str(folder),
            root=str(self._root),
            engine=self._engine,
            world_size=self._ranks.world_size,
            torch=str(torch.__version__),
            layout=self._layout,
            values=share.values,
            reason=reason,
            metric=metric,
            about=self._about,
            policy=self._policy,
            patience_s=PATIENCE_S,
            fence=self._fence,
        )

    @property
    def under_way(self) -> int:
        """Saves of which this rank does not know the outcome."""
        return sum(not flight.answered() for flight in self._flights.waiting)

    def settle(self) -> Saved | None:
        """Wait until every save is committed; returns the last one.

        Raises:
            TooLate, StorageError, CheckpointError: as :meth:`save`.
        """
        saved = None
        while self._flights.waiting:
            saved = self._land()
        return saved

    def _land(self) -> Saved:
        """Bring the oldest flight to its end, on all ranks alike."""
        flight = self._flights.waiting[0]
        self._flights.wait_for(flight, lambda: flight.written is not None)
        trouble = flight.written.trouble if flight.written is not None else None
        troubles = self._ranks.troubles(trouble)
        if troubles and flight.commit is not None:
            self._flights.worker.abandon(flight.step)
        self._flights.wait_for(flight, flight.answered)
        self._flights.waiting.popleft()
        failure = _failure(self._root, flight.step)
        late = any(t.of == "deadline" for t in troubles)
        try:
            if troubles:
                # Not at the deadline: it may be the file system that does not answer. The next restore does it.
                if not late:
                    self._ranks.on_first(lambda: self._discard(flight), failure)
                raise error(failure, troubles)
            size, save_s = self._ranks.on_first(lambda: _committed(flight), failure)
        except TooLate:
            late = True
            raise
        finally:
            self._given_up = self._given_up or late
        saved = self._saved(flight, size, save_s)
        self._tell(saved)
        return saved

    def _discard(self, flight: Flight) -> None:
        folders.discard(Path(flight.write.folder))
        fences.check(self._fence)  # a newer attempt takes away the folder in which the ranks are writing

    def _saved(self, flight: Flight, size: int, save_s: float) -> Saved:
        reason = flight.commit.reason if flight.commit is not None else "interval"
        path = index.step_folder(self._root, flight.step)
        return Saved(flight.step, path, size, flight.stall_s, save_s, reason)

    def _tell(self, saved: Saved) -> None:
        if saved.step not in self._heard:
            self._heard.add(saved.step)
            self._newest = saved.step
            self._on_commit(saved)

    def poll(self) -> bool:
        """Whether a save of this rank has failed since, so that all ranks should :meth:`settle`. Does not wait."""
        self._flights.hear()
        for flight in self._flights.waiting:
            if flight.commit is not None and flight.committed is not None and flight.committed.trouble is None:
                self._tell(self._saved(flight, *_committed(flight)))
        return any(f.trouble is not None for f in self._flights.waiting)

    def close(self, timeout_s: float = 0.0, *, over: bool = False) -> None:
        """Let the process that writes go when it is done; wait for it that long, so that what it does is not cut off by
        the end of the job. ``over``: nobody will restore what is on the node's own disk."""
        until = clock.monotonic() + (0.0 if self._given_up else timeout_s)
        self._flights.end(until, join=not self._given_up)
        self.poll()
        self._flights.worker.close()
        for staging in self._stagings:
            if not self._flights.needs(staging):
                staging.close()
        if over and self._local is not None and self._local.first and self._near_root is not None:
            near.remove(self._near_root)

    def await_copies(self, go_on: Callable[[], bool]) -> bool:
        """Wait until what is committed is behind the URL as well: while ``go_on()``, and copies do not fail all the
        time. Returns whether it is. Not collective: each rank waits for its own share, and rank 0 for all."""
        return self._flights.await_copies(self._newest, go_on)

    # -- restore

    def restore(self, state: dict[str, Any], agree: Agree = lambda made: None) -> Restored | None:
        """Put the newest checkpoint that verifies into ``state``; None when there is none at all. ``agree`` is asked
        before anything is loaded. It is collective, and raises on all ranks or on none.

        Newer ones that did not verify are set aside as ``damaged-step-…``: kept as evidence until a newer checkpoint
        is committed, but neither restored nor counted again.

        Raises:
            CheckpointError: there are checkpoints and none verifies, or they are of other objects.
            StorageError: on every rank, when any of them could not read. That is no damage, and nothing is set aside.
        """
        restored = self._restoring.newest(state, agree)
        if restored is not None:
            self._newest = restored.step
        if self._remote is not None and isinstance(self._flights.worker, Background):
            self._flights.worker.upload(
                Upload(
                    url=self._remote.url,
                    root=str(self._root),
                    rank=self._ranks.rank,
                    world_size=self._ranks.world_size,
                    attempt=self._attempt,
                    policy=self._remote.policy,
                    fence=self._fence,
                )
            )
        return restored

    def go_back(self, state: dict[str, Any], wanted: Wanted) -> Restored | None:
        """Put the newest checkpoint that verifies and has at most ``wanted.most`` steps into ``state``; newer ones do
        not count from now on. Not while a save is under way.

        Raises:
            Diverged: on all ranks, where the run has gone back too often, or there is no such checkpoint.
            CheckpointError, StorageError: as :meth:`restore`.
        """
        restored = self._restoring.before(state, wanted)
        self._heard = {step for step in self._heard if step <= wanted.most}
        self._newest = restored.step if restored is not None else 0
        self._flights.no_longer_copied(self._newest)
        return restored

    def condemn(self, wanted: Wanted) -> int:
        """Write down that the run goes back, which the next restore does; returns the newest step that is left. Not
        while a save is under way. Raises as :meth:`go_back`."""
        return self._restoring.condemn(wanted)

    def measured_unless(self, step: int, name: str) -> dict[int, float] | None:
        """Of the checkpoints that can be restored the values of the scalar ``name``, by step; None: that of ``step`` is
        among them."""
        return self._restoring.measured_unless(step, name)

    def left_out(self) -> rollback.Ranges:
        """By name in the state the ranges of positions of each loader that the run has gone back for."""
        return self._restoring.left_out()


def _failure(root: Path, step: int) -> str:
    return f"{root}: the checkpoint of step {step} was not saved"


def _committed(flight: Flight) -> tuple[int, float]:
    """Bytes, and seconds since the save began.

    Raises:
        CheckpointError: the commit failed.
    """
    outcome = flight.committed
    assert outcome is not None
    if outcome.trouble is not None:
        raise error("", [outcome.trouble])
    return outcome.bytes, outcome.ended - flight.started
