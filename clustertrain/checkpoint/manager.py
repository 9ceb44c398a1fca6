"""Save and restore, all ranks together.

A save is a copy of the state into memory, for which the ranks wait, and a write to disk by processes of their own, for
which they do not. What became of it the ranks tell each other at the next save or at the end.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from clustertrain import clock
from clustertrain.checkpoint import folders, points, rollback
from clustertrain.checkpoint import local as near
from clustertrain.checkpoint import manifest as index
from clustertrain.checkpoint.agree import Ranks
from clustertrain.checkpoint.background import Background, Inline, Outcome, Worker, WriterDied
from clustertrain.checkpoint.manifest import Damaged, Metric, Reason
from clustertrain.checkpoint.reader import Reader
from clustertrain.checkpoint.remote import Upload
from clustertrain.checkpoint.retention import Policy
from clustertrain.checkpoint.rollback import Wanted
from clustertrain.checkpoint.segments import Segment
from clustertrain.checkpoint.source import Folder, RemoteFolder
from clustertrain.checkpoint.staging import Staging
from clustertrain.checkpoint.state import Block, collect
from clustertrain.checkpoint.storage import StorageError
from clustertrain.checkpoint.trouble import TooLate, Trouble, error, told
from clustertrain.checkpoint.union import MARK_BYTES, Offer, Share, Union
from clustertrain.checkpoint.writer import Commit, Write
from clustertrain.errors import CheckpointError, Diverged

log = logging.getLogger(__name__)

LOOK_S = 1.0  # while it waits, for how long it may
_LATE = "it would not have been there before this process must end"
PATIENCE_S = 600.0  # for the slowest rank's part, from when rank 0 has written its own
FAILING_S = 600.0  # copies have failed for so long when nobody waits for them any more
CPU = torch.device("cpu")
KEEP = Policy()
_TOKEN_BYTES = 4


@dataclass(frozen=True)
class Saved:
    """``stall_s``: what training waited for. ``save_s``: from the call to the commit. ``bytes``: of all files."""

    step: int
    path: Path
    bytes: int
    stall_s: float
    save_s: float
    reason: Reason = "interval"


@dataclass(frozen=True)
class Restored:
    """``path`` may be behind a URL. ``rank_state`` is None when another number of ranks saved it. ``skipped`` tells
    which newer checkpoints were passed over: ``[{"step", "path", "why"}]``. ``from_local``: how many bytes all ranks
    have read from their nodes' own disks, on rank 0; None without that tier."""

    step: int
    path: Folder
    rank_state: Any
    restore_s: float
    skipped: list[dict[str, Any]] = field(default_factory=list)
    from_local: int | None = None


@dataclass(frozen=True)
class Made:
    """How a checkpoint was made; ``about`` as it was given to the manager that saved it."""

    layout: Mapping[str, Any]
    world_size: int
    torch: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Local:
    """The tier on the nodes' own disks. All ranks have one or none has; ``root`` is None where this node has no such
    disk."""

    root: Path | None
    first: bool  # this rank is the first of its node


@dataclass(frozen=True)
class Remote:
    """Where copies go, as many as ``policy`` says. ``needed``: there may be one without which the run would begin
    again."""

    url: str
    policy: Policy
    needed: bool


@dataclass
class _Flight:
    """A save under way on this rank; ``commit`` on rank 0 alone. ``sending`` is a thread that waits for a GPU."""

    write: Write
    commit: Commit | None
    staging: Staging
    started: float
    stall_s: float
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


@dataclass(frozen=True)
class _Offering:
    """What this rank can give to a save, or why it cannot; ``records`` waits for the word of all ranks."""

    offer: Offer | None
    trouble: Trouble | None
    records: Callable[[], list[bytes]]


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
        until: Callable[[], float | None] = lambda: None,
        on_commit: Callable[[Saved], None] = lambda saved: None,
        on_copy: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        """``on_commit`` is called on every rank, once a checkpoint, when this rank hears of it: rank 0 first;
        ``sharers`` is the number of ranks on this machine;
        ``until`` says when waiting ends, by the monotonic clock; it is asked again and again;
        ``on_copy`` on rank 0 when all of one is copied, and on a rank that could not copy its share. ``local`` and
        ``remote`` need ``background``."""
        self._root = root
        self._ranks = ranks
        self._union = Union(ranks)
        self._attempt = attempt
        self._layout = dict(layout)
        self._policy = policy
        self._engine = engine
        self._about = dict(about or {})
        self._until = until
        self._given_up = False
        self._on_commit = on_commit
        self._on_copy = on_copy
        self._remote = remote
        self._newest = 0  # step that is known to be committed
        self._copied = -1  # step up to which there is nothing left to copy
        self._failing_since: float | None = None  # of copies
        self._worker: Worker = Background(engine) if background else Inline()
        buffers = 2 if device.type == "cuda" else 1
        self._stagings = [Staging(root, device, sharers * buffers) for _ in range(buffers)]
        self._local = local
        self._near_root = local.root if local is not None else None
        self._flights: deque[_Flight] = deque()
        # With a disk of the node's own one more can be on its way, whose memory is free already.
        self._most_flights = len(self._stagings) + (local is not None)
        self._saves = 0
        self._heard: set[int] = set()

    def start(self) -> None:
        """Begin to start the process that writes, ahead of the first save. Not collective."""
        if isinstance(self._worker, Background):
            self._worker.start()

    def reserve(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None = None) -> None:
        """Make room for a save of ``state`` ahead of the first one, beside what goes on."""
        offering = self._offer(state, rank_state or {})
        share, *_ = self._agreed(offering, state, f"{self._root}: nothing can be saved")
        for staging in self._stagings:
            try:
                staging.reserve(share.blocks)
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
            StorageError: on every rank, when any of them could not write, this time or the last. Nothing was committed
                then, and the older checkpoints are as they were.
            CheckpointError: likewise, where the state is one that cannot be saved.
        """
        started = clock.monotonic()
        while len(self._flights) >= self._most_flights:
            try:
                self._land()
            except TooLate:
                raise
            except CheckpointError as e:  # on all ranks alike
                if reason == "interval":
                    raise
                log.warning("%s; what is saved now matters more", e)
        points.reached("before staging", self._ranks.rank)
        number = self._saves % len(self._stagings)
        self._saves += 1
        staging = self._stagings[number]
        taken = not self._is_free(staging)
        offering = self._offer(state, rank_state or {}, step)
        # The ranks tell each other while they copy: what each has to write is what it wrote the last time, as a rule.
        expected = None if offering.offer is None or taken else self._union.expected(offering.offer)
        staged = self._fill(staging, expected) if expected is not None else None
        share, token, as_expected = self._agreed(offering, state, _failure(self._root, step), step)
        if taken:
            staged = Trouble(why=_LATE, of="deadline")
        elif staged is None or not as_expected:
            staged = self._fill(staging, share.blocks)
        folder = folders.of_save(self._root, step, self._attempt, token)
        write = Write(
            step=step,
            folder=str(folder),
            rank=self._ranks.rank,
            engine=self._engine,
            memory=number,
            segments=staged if isinstance(staged, list) else [],
            own=offering.offer.collected.own if offering.offer is not None else None,
            # What a stop or the end waits for goes where it counts.
            local=str(near.folder_of(self._near_root, folder.name)) if self._near_root and not wait else "",
        )
        commit = self._commit(step, folder, share, reason, metric) if self._ranks.rank == 0 else None
        flight = _Flight(write, commit, staging, started, 0.0)
        self._flights.append(flight)
        if isinstance(staged, Trouble):  # told to the others when they land
            self._failed(flight, staged)
        elif staging.asynchronous:
            flight.sending = threading.Thread(target=self._send, args=(flight,), daemon=True)
            flight.sending.start()
        else:
            self._send(flight)
        flight.stall_s = clock.monotonic() - started
        if not (wait or isinstance(self._worker, Inline)):
            return None
        return self.settle()

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
        )

    def _is_free(self, staging: Staging) -> bool:
        """Wait until nothing in the memory is needed any more; False: it was still in use at the deadline."""
        free = True
        for before in self._flights:
            if before.staging is staging:
                self._await(before, lambda: before.kept or before.written is not None)  # noqa: B023
                free = free and (before.kept or not _is_late(before.written))
        return free

    def _fill(self, staging: Staging, blocks: Sequence[Block]) -> list[Segment] | Trouble:
        points.reached("while staging", self._ranks.rank)
        try:
            segments = staging.fill(blocks)
        except OSError as e:
            return told(e)
        points.reached("staged", self._ranks.rank)
        return segments

    def _send(self, flight: _Flight) -> None:
        try:
            flight.staging.ready()
            if flight.written is None:
                self._worker.submit(flight.write, flight.staging)
            if flight.commit is not None and flight.committed is None:
                self._worker.submit(flight.commit, None)
        except Exception as e:  # also of a thread: nobody would hear of it, and wait for an answer for ever
            self._failed(flight, Trouble(why=f"{type(e).__name__}: {e}", of="storage"))

    def _failed(self, flight: _Flight, trouble: Trouble) -> None:
        failed = Outcome(step=flight.step, of="write", ended=clock.monotonic(), trouble=trouble)
        flight.written = flight.written or failed
        if flight.commit is not None:
            flight.committed = flight.committed or failed

    @property
    def under_way(self) -> int:
        """Saves of which this rank does not know the outcome."""
        return sum(not flight.answered() for flight in self._flights)

    def settle(self) -> Saved | None:
        """Wait until every save is committed; returns the last one.

        Raises:
            TooLate, StorageError, CheckpointError: as :meth:`save`.
        """
        saved = None
        while self._flights:
            saved = self._land()
        return saved

    def _land(self) -> Saved:
        """Bring the oldest flight to its end, on all ranks alike."""
        flight = self._flights[0]
        self._await(flight, lambda: flight.written is not None)
        trouble = flight.written.trouble if flight.written is not None else None
        troubles = self._ranks.troubles(trouble)
        if troubles and flight.commit is not None:
            self._worker.abandon(flight.step)
        self._await(flight, flight.answered)
        self._flights.popleft()
        failure = _failure(self._root, flight.step)
        late = any(t.of == "deadline" for t in troubles)
        try:
            if troubles:
                # Not at the deadline: it may be the file system that does not answer. The next restore does it.
                if not late:
                    self._on_rank_0(lambda: folders.discard(Path(flight.write.folder)), failure)
                raise error(failure, troubles)
            size, save_s = self._on_rank_0(lambda: _committed(flight), failure)
        except TooLate:
            late = True
            raise
        finally:
            self._given_up = self._given_up or late
        saved = self._saved(flight, size, save_s)
        self._tell(saved)
        return saved

    def _saved(self, flight: _Flight, size: int, save_s: float) -> Saved:
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
        while (self._flights or self._remote) and self._take(0.0):
            pass
        for flight in self._flights:
            if flight.commit is not None and flight.committed is not None and flight.committed.trouble is None:
                self._tell(self._saved(flight, *_committed(flight)))
        return any(f.trouble is not None for f in self._flights)

    def close(self, timeout_s: float = 0.0, *, over: bool = False) -> None:
        """Let the process that writes go when it is done; wait for it that long, so that what it does is not cut off by
        the end of the job. ``over``: nobody will restore what is on the node's own disk."""
        until = clock.monotonic() + (0.0 if self._given_up else timeout_s)
        while self._flights and not self._flights[-1].answered() and (left := until - clock.monotonic()) > 0:
            self._take(left)
        for flight in self._flights:
            if flight.sending is not None:
                flight.sending.join(0.0 if self._given_up else None)
        self.poll()
        self._worker.close()
        for staging in self._stagings:
            if not any(f.staging is staging and f.sending is not None and f.sending.is_alive() for f in self._flights):
                staging.close()
        if over and self._local is not None and self._local.first and self._near_root is not None:
            near.remove(self._near_root)

    def _await(self, flight: _Flight, done: Callable[[], bool]) -> None:
        while not done():
            until = self._until()
            left = LOOK_S if until is None else min(LOOK_S, until - clock.monotonic())
            if left <= 0:
                self._worker.abandon(flight.step)
                self._failed(flight, Trouble(why=_LATE, of="deadline"))
            elif flight.sending is not None and flight.sending.is_alive():
                flight.sending.join(left)
            elif not self._take(left) and not self._worker.alive:
                self._again(WriterDied("the process that writes checkpoints is gone"))

    def _take(self, timeout_s: float | None) -> bool:
        """Take one outcome; False: there was none in time."""
        try:
            outcome = self._worker.outcome(timeout_s)
        except WriterDied as e:
            self._again(e)
            return True
        if outcome is None:
            return False
        if outcome.of == "copy":
            self._hear_of_copy(outcome)
            return True
        for flight in self._flights:
            if flight.step == outcome.step:
                if outcome.of == "keep":
                    flight.kept = True
                    flight.write = msgspec.structs.replace(flight.write, memory=None)
                elif outcome.of == "write":
                    flight.written = outcome
                else:
                    flight.committed = outcome
        return True

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

    def await_copies(self, go_on: Callable[[], bool]) -> bool:
        """Wait until what is committed is behind the URL as well: while ``go_on()``, and copies do not fail all the
        time. Returns whether it is. Not collective: each rank waits for its own share, and rank 0 for all."""
        tries = 1
        while self._remote is not None and self._copied < self._newest:
            if isinstance(self._worker, Background) and not self._worker.alive:
                if not tries:
                    return False
                tries -= 1
                self._worker.start()
            failing_s = 0.0 if self._failing_since is None else clock.monotonic() - self._failing_since
            if failing_s > FAILING_S or not go_on():
                return False
            self._take(0.2)
        return True

    def _again(self, e: WriterDied) -> None:
        """Another process goes on with what the dead one left, once: its memory is still there."""
        for flight in self._flights:
            if flight.answered() or (flight.sending is not None and flight.sending.is_alive()):
                continue
            if not flight.retried:
                log.warning("%s; another one goes on with step %d", e, flight.step)
                flight.retried = True
                self._send(flight)
                continue
            self._failed(flight, Trouble(why=f"{e}, twice", of="storage"))

    def _offer(self, state: Mapping[str, Any], rank_state: Mapping[str, Any], step: int | None = None) -> _Offering:
        """Begin to tell the others what this rank holds; with a ``step`` there is a folder for it afterwards."""
        trouble, offer, token = None, None, secrets.token_bytes(_TOKEN_BYTES)
        try:
            offer = Offer(collect(state, rank_state, self._ranks.rank))
            if step is not None and self._ranks.rank == 0:
                folders.make(folders.of_save(self._root, step, self._attempt, token))
        except (OSError, CheckpointError) as e:
            trouble = told(e)
        mark = offer.mark if offer is not None and trouble is None else bytes(MARK_BYTES)
        records = self._ranks.exchange(bytes([trouble is not None]) + token + mark)
        return _Offering(offer, trouble, records)

    def _agreed(
        self, offering: _Offering, state: Mapping[str, Any], failure: str, step: int | None = None
    ) -> tuple[Share, bytes, bool]:
        """What this rank writes, the token of the folder, and whether nobody holds anything new. Where all ranks hold
        the same things, what was begun is all that they have to tell each other."""
        records = offering.records()
        token = records[0][1 : 1 + _TOKEN_BYTES]
        if offering.offer is None or any(r[0] for r in records):
            troubles = self._ranks.troubles(offering.trouble)
            if step is not None and self._ranks.rank == 0:
                shutil.rmtree(folders.of_save(self._root, step, self._attempt, token), ignore_errors=True)
            raise error(failure, troubles)
        optimizers = [k for k, v in state.items() if isinstance(v, torch.optim.Optimizer)]
        marks = [r[1 + _TOKEN_BYTES :] for r in records]
        known = self._union.agrees(marks)
        return self._union.share(offering.offer, marks, optimizers), token, known

    def _on_rank_0(self, act: Callable[[], Any], failure: str) -> Any:
        """Run ``act`` on rank 0 and tell all ranks what it returned, or that it failed."""
        outcome: dict[str, Any] = {}
        if self._ranks.rank == 0:
            try:
                outcome = {"value": act()}
            except (OSError, CheckpointError) as e:
                trouble = told(e)
                outcome = {"trouble": {"why": trouble.why, "of": trouble.of}}
        outcome = self._ranks.broadcast(outcome)
        if "trouble" in outcome:
            raise error(failure, [Trouble(**outcome["trouble"])])
        return outcome["value"]

    # -- restore

    def restore(self, state: dict[str, Any], agree: Callable[[Made], None] = lambda made: None) -> Restored | None:
        """Put the newest checkpoint that verifies into ``state``; None when there is none at all. ``agree`` is asked
        before anything is loaded, on every rank, and may raise what is then raised on all of them.

        Newer ones that did not verify are set aside as ``damaged-step-…``: kept as evidence until a newer checkpoint
        is committed, but neither restored nor counted again.

        Raises:
            CheckpointError: there are checkpoints and none verifies, or they are of other objects.
            StorageError: on every rank, when any of them could not read. That is no damage, and nothing is set aside.
        """
        self._on_rank_0(self._clear_up, f"{self._root}: cannot be used for checkpoints")
        restored = self._restore(state, agree)
        if restored is not None:
            self._newest = restored.step
        if self._remote is not None and isinstance(self._worker, Background):
            self._worker.upload(
                Upload(
                    url=self._remote.url,
                    root=str(self._root),
                    rank=self._ranks.rank,
                    world_size=self._ranks.world_size,
                    attempt=self._attempt,
                    policy=self._remote.policy,
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
        failure = f"{self._root}: the run cannot go back"
        refused = self._on_rank_0(lambda: self._condemn(wanted), failure)
        if refused is not None:
            raise Diverged(refused["message"], fix=refused["fix"])
        self._on_rank_0(self._clear_up, failure)
        self._heard = {step for step in self._heard if step <= wanted.most}
        restored = self._restore(state, lambda made: None)  # the restore before has asked
        self._newest = restored.step if restored is not None else 0
        self._copied = min(self._copied, self._newest)
        return restored

    def left_out(self) -> rollback.Ranges:
        """By name in the state the ranges of positions of each loader that the run has gone back for."""
        found: rollback.Ranges = self._on_rank_0(
            lambda: rollback.left_out(self._root), f"{self._root}: the record of roll-backs cannot be read"
        )
        return found

    def _condemn(self, wanted: Wanted) -> dict[str, str | None] | None:
        try:
            rollback.begin(self._root, self._behind() if self._remote is not None else None, wanted)
        except Diverged as e:  # the other ranks must hear of it
            return {"message": e.message, "fix": e.fix}
        return None

    def _clear_up(self) -> None:
        folders.sweep(self._root)
        rollback.enforce(self._root, self._behind() if self._remote is not None else None)

    def _restore(self, state: dict[str, Any], agree: Callable[[Made], None]) -> Restored | None:
        started = clock.monotonic()
        found = self._on_rank_0(self._found, f"{self._root}: the checkpoints cannot be listed")
        skipped: list[dict[str, Any]] = []
        for step, is_here in reversed(found):
            folder: Folder = index.step_folder(self._root, step) if is_here else index.step_folder(self._behind(), step)
            trouble, manifest, reader, other_objects = None, None, None, None
            try:
                manifest = index.read_manifest(folder)
                index.check_sizes(folder, manifest)
                agree(Made(manifest.layout, manifest.world_size, manifest.torch, manifest.about))
                nearer = near.Near(self._near_root, manifest.made_in) if self._near_root is not None else None
                reader = Reader(folder, manifest, self._ranks, nearer)
                finish = reader.load(state)
                same_world = manifest.world_size == self._ranks.world_size
                rank_state = reader.rank_state(self._ranks.rank) if same_world else None
            except (Damaged, StorageError) as e:
                trouble = told(e)
            except CheckpointError as e:  # the other ranks must hear of it: they wait for this one's word
                trouble, other_objects = Trouble(why=e.message, of="objects"), e
            try:
                troubles = self._ranks.troubles(trouble)
                if not troubles and reader is not None:
                    troubles = self._ranks.troubles(_completed(reader))
            finally:
                if reader is not None:
                    reader.close()
            if not troubles:
                finish()
                self._on_rank_0(lambda: folders.mark_damaged(skipped), "damaged checkpoints cannot be set aside")
                restored = Restored(step, folder, rank_state, clock.monotonic() - started, skipped)
                return self._with_local(restored, manifest.made_in if manifest else "", nearer.bytes if nearer else 0)
            if other_objects is not None:
                raise other_objects
            if any(t.of == "objects" for t in troubles):
                raise error(f"{folder}: cannot be loaded", [t for t in troubles if t.of == "objects"])
            if any(t.of != "state" for t in troubles):
                raise error(f"{folder}: cannot be read", troubles)
            skipped.append({"step": step, "path": str(folder), "why": "; ".join(t.why for t in troubles)})
        if skipped:
            listed = "\n  ".join(s["why"] for s in skipped)
            raise CheckpointError(
                f"{self._root}: no checkpoint verifies:\n  {listed}",
                fix="restore the files, or move the checkpoints away to begin again",
            )
        return None

    def _with_local(self, restored: Restored, made_in: str, read: int) -> Restored:
        """``read``: so many bytes this rank found on its node's own disk, where nothing else is worth keeping now."""
        if self._local is None:
            return restored
        if self._local.first and self._near_root is not None:
            near.tidy(self._near_root, made_in, self._attempt)
        return dataclasses.replace(restored, from_local=sum(self._ranks.gather(read)))

    def _found(self) -> list[tuple[int, bool]]:
        """What can be restored, the oldest first: the step, and whether it is here or only behind the URL. Here is
        after there, where it is in both."""
        # A folder has this name only when its marker is there: one without is damaged, not unfinished.
        here = [index.step_of(p) or 0 for p in index.folders(self._root)]
        there: list[int] = []
        if self._remote is not None:
            try:
                committed = [(index.step_of(p) or 0, p) for p in index.folders(self._behind()) if index.is_committed(p)]
                there = [step for step, p in committed if rollback.counts(self._root, p, step)]
            except StorageError as e:
                if self._remote.needed and not here:
                    raise
                log.warning("%s; not looked at for newer checkpoints", e.message)
        return sorted([*((s, True) for s in here), *((s, False) for s in there)])

    def _behind(self) -> RemoteFolder:
        assert self._remote is not None
        return RemoteFolder(self._remote.url)


def _completed(reader: Reader) -> Trouble | None:
    try:
        reader.complete()
    except (Damaged, StorageError) as e:
        return told(e)
    return None


def _is_late(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.trouble is not None and outcome.trouble.of == "deadline"


def _failure(root: Path, step: int) -> str:
    return f"{root}: the checkpoint of step {step} was not saved"


def _committed(flight: _Flight) -> tuple[int, float]:
    """Bytes, and seconds since the save began.

    Raises:
        CheckpointError: the commit failed.
    """
    outcome = flight.committed
    assert outcome is not None
    if outcome.trouble is not None:
        raise error("", [outcome.trouble])
    return outcome.bytes, outcome.ended - flight.started
