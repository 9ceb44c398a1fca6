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
from clustertrain.checkpoint.core.failures import DeadlineExceeded, Failure, error_from_failures
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format import fence as fences
from clustertrain.checkpoint.format import folders
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.fence import Fence
from clustertrain.checkpoint.format.manifest import CheckpointMetric, SaveReason
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.load.restore import (
    CheckpointOrigin,
    LocalTier,
    OriginCheck,
    RemoteTier,
    Restorer,
    RestoreResult,
)
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.checkpoint.save import node_local as local_tier
from clustertrain.checkpoint.save.commit import CommitJob, WriteJob
from clustertrain.checkpoint.save.global_plan import RankPlan
from clustertrain.checkpoint.save.pending_saves import PendingSave, PendingSaves
from clustertrain.checkpoint.save.planner import SavePlanner
from clustertrain.checkpoint.save.remote import UploadJob
from clustertrain.checkpoint.save.staging import StagingBuffer
from clustertrain.checkpoint.save.writer_client import InlineRunner, JobOutcome, WriterClient
from clustertrain.errors import CheckpointError

__all__ = ["CheckpointManager", "CheckpointOrigin", "LocalTier", "RemoteTier", "RestoreResult", "SaveResult"]

log = logging.getLogger(__name__)

RANK_TIMEOUT_S = 600.0  # for the slowest rank's part, from when rank 0 has written its own
CPU = torch.device("cpu")
DEFAULT_POLICY = RetentionPolicy()


@dataclass(frozen=True)
class SaveResult:
    """``stall_s``: what training waited for. ``save_s``: from the call to the commit. ``bytes``: of all files."""

    step: int
    path: Path
    bytes: int
    stall_s: float
    save_s: float
    reason: SaveReason = "interval"


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
        policy: RetentionPolicy = DEFAULT_POLICY,
        engine: str = "raw",
        background: bool = True,
        device: torch.device = CPU,
        local_world_size: int = 1,
        about: Mapping[str, Any] | None = None,
        local: LocalTier | None = None,
        remote: RemoteTier | None = None,
        fence: Fence | None = None,
        get_deadline: Callable[[], float | None] = lambda: None,
        on_commit: Callable[[SaveResult], None] = lambda saved: None,
        on_copy: Callable[[JobOutcome], None] = lambda outcome: None,
    ) -> None:
        """``on_commit`` is called on every rank, once a checkpoint, when this rank hears of it: rank 0 first;
        ``fence`` tells whether a newer attempt owns the run, after which nothing of ``root`` is changed any more;
        ``local_world_size`` is the number of ranks on this machine;
        ``get_deadline`` says when waiting ends, by the monotonic clock; it is asked again and again;
        ``on_copy`` on rank 0 when all of one is copied, and on a rank that could not copy its share. ``local`` and
        ``remote`` need ``background``."""
        self._root = root
        self._ranks = ranks
        self._planner = SavePlanner(root, ranks, attempt)
        self._restorer = Restorer(root, ranks, attempt, local, remote, fence)
        self._fence = fence
        self._attempt = attempt
        self._layout = dict(layout)
        self._policy = policy
        self._engine = engine
        self._about = dict(about or {})
        self._deadline_missed = False
        self._on_commit = on_commit
        self._remote = remote
        self._newest_committed = 0  # step that is known to be committed
        buffers = 2 if device.type == "cuda" else 1
        self._staging_buffers = [StagingBuffer(root, device, local_world_size * buffers) for _ in range(buffers)]
        self._local = local
        self._local_root = local.root if local is not None else None
        worker = WriterClient(engine) if background else InlineRunner()
        self._pending = PendingSaves(worker, get_deadline, on_copy, has_remote=remote is not None)
        # With a disk of the node's own one more can be on its way, whose memory is free already.
        self._max_pending = len(self._staging_buffers) + (local is not None)
        self._num_saves = 0
        self._reported_steps: set[int] = set()

    def start(self) -> None:
        """Begin to start the process that writes, ahead of the first save. Not collective."""
        if isinstance(self._pending.worker, WriterClient):
            self._pending.worker.start()

    def reserve(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None = None) -> None:
        """Make room for a save of ``state`` ahead of the first one, beside what goes on."""
        shards = self._planner.plan_shards(state, rank_state or {}, error_prefix=f"{self._root}: nothing can be saved")
        for staging in self._staging_buffers:
            try:
                staging.reserve(shards)
            except OSError as e:  # a save will say so, where there is one before the room is there
                log.warning("no room for a copy of the state yet: %s", e)

    # -- save

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
        *,
        reason: SaveReason = "interval",
        metric: CheckpointMetric | None = None,
        wait: bool = False,
    ) -> SaveResult | None:
        """Begin to save, and with ``wait`` see it committed; returns what was saved then. Waits for an earlier save
        that is still under way and has the memory that this one needs. A committed checkpoint of the same step is
        replaced only by a committed one.

        Raises:
            DeadlineExceeded: on every rank, when the time to wait was over. Nothing is known to be committed.
            AttemptSuperseded: on every rank, a newer attempt owns the run. Nothing was committed.
            StorageError: on every rank, when any of them could not write, this time or the last. Nothing was committed
                then, and the older checkpoints are as they were.
            CheckpointError: likewise, where the state is one that cannot be saved.
        """
        started = clock.monotonic()
        self._wait_for_slot(reason)
        fault_points.fault_point("before_staging", self._ranks.rank)
        buffer_index = self._num_saves % len(self._staging_buffers)
        self._num_saves += 1
        staging = self._staging_buffers[buffer_index]
        deadline_passed = not self._pending.wait_until_free(staging)
        staged_save = self._planner.stage(
            staging,
            step,
            state,
            rank_state or {},
            error_prefix=_not_saved_prefix(self._root, step),
            deadline_passed=deadline_passed,
        )
        folder, staged = staged_save.folder, staged_save.staged
        write = WriteJob(
            step=step,
            folder=str(folder),
            rank=self._ranks.rank,
            engine=self._engine,
            memory=buffer_index,
            segments=staged if isinstance(staged, list) else [],
            own=staged_save.rank_values,
            # What a stop or the end waits for goes where it counts.
            local=str(local_tier.local_folder(self._local_root, folder.name)) if self._local_root and not wait else "",
        )
        commit = self._commit(step, folder, staged_save.rank_plan, reason, metric) if self._ranks.rank == 0 else None
        pending = PendingSave(write, commit, staging, started)
        if isinstance(staged, Failure):
            pending.fail(staged)
        self._pending.begin(pending)
        pending.stall_s = clock.monotonic() - started
        if not (wait or isinstance(self._pending.worker, InlineRunner)):
            return None
        return self.wait_for_saves()

    def _wait_for_slot(self, reason: SaveReason) -> None:
        """Bring to an end what is under way, until there is room for one more."""
        while len(self._pending.waiting) >= self._max_pending:
            try:
                self._finish_oldest()
            except DeadlineExceeded:
                raise
            except CheckpointError as e:  # on all ranks alike
                if reason in ("interval", "best"):
                    raise
                log.warning("%s; what is saved now matters more", e)

    def _commit(
        self, step: int, folder: Path, rank_plan: RankPlan, reason: SaveReason, metric: CheckpointMetric | None
    ) -> CommitJob:
        return CommitJob(
            step=step,
            folder=str(folder),
            root=str(self._root),
            engine=self._engine,
            world_size=self._ranks.world_size,
            torch=str(torch.__version__),
            layout=self._layout,
            values=rank_plan.values,
            reason=reason,
            metric=metric,
            about=self._about,
            policy=self._policy,
            patience_s=RANK_TIMEOUT_S,
            fence=self._fence,
        )

    @property
    def num_pending(self) -> int:
        """Saves of which this rank does not know the outcome."""
        return sum(not p.is_done() for p in self._pending.waiting)

    def wait_for_saves(self) -> SaveResult | None:
        """Wait until every save is committed; returns the last one.

        Raises:
            DeadlineExceeded, StorageError, CheckpointError: as :meth:`save`.
        """
        saved = None
        while self._pending.waiting:
            saved = self._finish_oldest()
        return saved

    def _finish_oldest(self) -> SaveResult:
        """Bring the oldest flight to its end, on all ranks alike."""
        pending = self._pending.waiting[0]
        self._pending.wait_until(pending, lambda: pending.written is not None)
        own_failure = pending.written.trouble if pending.written is not None else None
        failures = self._ranks.all_gather_failures(own_failure)
        if failures and pending.commit is not None:
            self._pending.worker.abort_commit(pending.step)
        self._pending.wait_until(pending, pending.is_done)
        self._pending.waiting.popleft()
        error_prefix = _not_saved_prefix(self._root, pending.step)
        deadline_passed = any(f.of == "deadline" for f in failures)
        try:
            if failures:
                # Not at the deadline: it may be the file system that does not answer. The next restore does it.
                if not deadline_passed:
                    self._ranks.run_on_rank0(lambda: self._discard_folder(pending), error_prefix)
                raise error_from_failures(error_prefix, failures)
            size, save_s = self._ranks.run_on_rank0(lambda: _commit_result(pending), error_prefix)
        except DeadlineExceeded:
            deadline_passed = True
            raise
        finally:
            self._deadline_missed = self._deadline_missed or deadline_passed
        saved = self._build_result(pending, size, save_s)
        self._notify_commit(saved)
        return saved

    def _discard_folder(self, pending: PendingSave) -> None:
        folders.discard(Path(pending.write.folder))
        fences.check_fence(self._fence)  # a newer attempt takes away the folder in which the ranks are writing

    def _build_result(self, pending: PendingSave, size: int, save_s: float) -> SaveResult:
        reason = pending.commit.reason if pending.commit is not None else "interval"
        path = index.step_folder(self._root, pending.step)
        return SaveResult(pending.step, path, size, pending.stall_s, save_s, reason)

    def _notify_commit(self, saved: SaveResult) -> None:
        if saved.step not in self._reported_steps:
            self._reported_steps.add(saved.step)
            self._newest_committed = saved.step
            self._on_commit(saved)

    def poll(self) -> bool:
        """Whether a save of this rank has failed since, so that all ranks should :meth:`wait_for_saves`. Does not
        wait."""
        self._pending.poll_outcomes()
        for pending in self._pending.waiting:
            if pending.commit is not None and pending.committed is not None and pending.committed.trouble is None:
                self._notify_commit(self._build_result(pending, *_commit_result(pending)))
        return any(p.failure is not None for p in self._pending.waiting)

    def close(self, timeout_s: float = 0.0, *, run_finished: bool = False) -> None:
        """Let the process that writes go when it is done; wait for it that long, so that what it does is not cut off by
        the end of the job. ``run_finished``: nobody will restore what is on the node's own disk."""
        deadline = clock.monotonic() + (0.0 if self._deadline_missed else timeout_s)
        self._pending.drain(deadline, join=not self._deadline_missed)
        self.poll()
        self._pending.worker.close()
        for staging in self._staging_buffers:
            if not self._pending.is_in_use(staging):
                staging.close()
        if run_finished and self._local is not None and self._local.is_node_leader and self._local_root is not None:
            local_tier.remove_all(self._local_root)

    def wait_for_copies(self, should_continue: Callable[[], bool]) -> bool:
        """Wait until what is committed is behind the URL as well: while ``should_continue()``, and copies do not fail
        all the time. Returns whether it is. Not collective: each rank waits for its own share, and rank 0 for all."""
        return self._pending.wait_for_copies(self._newest_committed, should_continue)

    # -- restore

    def restore(self, state: dict[str, Any], check_origin: OriginCheck = lambda origin: None) -> RestoreResult | None:
        """Put the newest checkpoint that verifies into ``state``; None when there is none at all. ``check_origin`` is
        asked before anything is loaded. It is collective, and raises on all ranks or on none.

        Newer ones that did not verify are set aside as ``damaged-step-…``: kept as evidence until a newer checkpoint
        is committed, but neither restored nor counted again.

        Raises:
            CheckpointError: there are checkpoints and none verifies, or they are of other objects.
            StorageError: on every rank, when any of them could not read. That is no damage, and nothing is set aside.
        """
        restored = self._restorer.restore_newest(state, check_origin)
        if restored is not None:
            self._newest_committed = restored.step
        if self._remote is not None and isinstance(self._pending.worker, WriterClient):
            self._pending.worker.start_upload(
                UploadJob(
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

    def roll_back(self, state: dict[str, Any], target: RollbackTarget) -> RestoreResult | None:
        """Put the newest checkpoint that verifies and has at most ``target.most`` steps into ``state``; newer ones do
        not count from now on. Not while a save is under way.

        Raises:
            Diverged: on all ranks, where the run has gone back too often, or there is no such checkpoint.
            CheckpointError, StorageError: as :meth:`restore`.
        """
        restored = self._restorer.restore_before(state, target)
        self._reported_steps = {step for step in self._reported_steps if step <= target.max_step}
        self._newest_committed = restored.step if restored is not None else 0
        self._pending.limit_copied_upto(self._newest_committed)
        return restored

    def invalidate(self, target: RollbackTarget) -> int:
        """Write down that the run goes back, which the next restore does; returns the newest step that is left. Not
        while a save is under way. Raises as :meth:`roll_back`."""
        return self._restorer.invalidate(target)

    def metric_values_if_missing(self, step: int, name: str) -> dict[int, float] | None:
        """Of the checkpoints that can be restored the values of the scalar ``name``, by step; None: that of ``step`` is
        among them."""
        return self._restorer.metric_values_if_missing(step, name)

    def excluded_ranges(self) -> rollback.PositionRanges:
        """By name in the state the ranges of positions of each loader that the run has gone back for."""
        return self._restorer.excluded_ranges()


def _not_saved_prefix(root: Path, step: int) -> str:
    return f"{root}: the checkpoint of step {step} was not saved"


def _commit_result(pending: PendingSave) -> tuple[int, float]:
    """Bytes, and seconds since the save began.

    Raises:
        CheckpointError: the commit failed.
    """
    outcome = pending.committed
    assert outcome is not None
    if outcome.trouble is not None:
        raise error_from_failures("", [outcome.trouble])
    return outcome.bytes, outcome.ended - pending.started
