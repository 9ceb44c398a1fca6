"""Saves and restores checkpoints, all ranks together.

A save copies the state into memory while the ranks wait; writer processes then write it to disk while training
continues. The ranks exchange the outcome at the next save or at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clustertrain import clock
from clustertrain.checkpoint.core import fault_points
from clustertrain.checkpoint.core.failures import DeadlineExceeded, Failure, error_from_failures
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.core.state_dict import LoadableState, StateTree
from clustertrain.checkpoint.format import folders
from clustertrain.checkpoint.format.fence import Fence, check_fence
from clustertrain.checkpoint.format.manifest import CheckpointMetric, SaveReason, step_folder
from clustertrain.checkpoint.load import restore
from clustertrain.checkpoint.load.restore import LocalTier, OriginCheck, RemoteTier, RestoreContext, RestoreResult
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.checkpoint.save import node_local
from clustertrain.checkpoint.save.pending_saves import PendingSave, PendingSaves
from clustertrain.checkpoint.save.planner import SavePlanner, StagedSave
from clustertrain.checkpoint.save.staging import StagingBuffer
from clustertrain.checkpoint.save.writer_client import InlineRunner, WriterClient
from clustertrain.checkpoint.save.writer_jobs import CommitJob, JobOutcome, UploadJob, WriteJob
from clustertrain.errors import CheckpointError

log = logging.getLogger(__name__)

RANK_TIMEOUT_S = 600.0  # for the slowest rank's part, from when rank 0's part is written
CPU = torch.device("cpu")
DEFAULT_POLICY = RetentionPolicy()


@dataclass(frozen=True)
class CheckpointConfig:
    """The settings of a manager."""

    attempt: str
    """The attempt of the run, used in the names of staging folders."""
    layout: Mapping[str, Any]
    """The parallel layout, recorded in each checkpoint."""
    policy: RetentionPolicy = DEFAULT_POLICY
    """Which checkpoints to keep."""
    engine: str = "raw"
    """One of :data:`clustertrain.checkpoint.save.engines.ENGINES`."""
    async_save: bool = True
    """Whether to write in a separate process; otherwise the rank writes while training waits."""
    device: torch.device = CPU
    """The device of the state. For a GPU there are two staging buffers: one fills while the other is written."""
    local_world_size: int = 1
    """Ranks on this machine, which share its memory for staging buffers."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What produced the checkpoints, recorded in each of them."""
    local: LocalTier | None = None
    """Write to the nodes' own disks first. Needs ``async_save``."""
    remote: RemoteTier | None = None
    """Upload committed checkpoints. Needs ``async_save``."""
    fence: Fence | None = None
    """Detects that a newer attempt owns the run. Nothing in the folder of the checkpoints is then changed anymore."""


@dataclass(frozen=True)
class SaveResult:
    """A committed checkpoint."""

    step: int
    path: Path
    bytes: int
    """Size of all its files."""
    written: int
    """Size of those that were written, and not linked from an earlier checkpoint."""
    stall_s: float
    """Seconds for which training waited."""
    save_s: float
    """Seconds from the call to the commit."""
    reason: SaveReason = "interval"


class CheckpointManager:
    """Manager of the checkpoints in one folder.

    Its methods are collective, except :meth:`start`, :meth:`poll`, :meth:`wait_for_copies` and :meth:`close`.

    Host memory: one copy of this rank's part of the state, two for a GPU.

    ``restore_context`` is the argument of the functions in :mod:`clustertrain.checkpoint.load.restore`.
    """

    def __init__(
        self,
        root: Path,
        ranks: Ranks,
        config: CheckpointConfig,
        *,
        get_save_deadline: Callable[[], float | None] = lambda: None,
        on_commit: Callable[[SaveResult], None] = lambda saved: None,
        on_copy: Callable[[JobOutcome], None] = lambda outcome: None,
    ) -> None:
        """
        Args:
            get_save_deadline: returns the monotonic time at which waiting for a save ends; called repeatedly.
            on_commit: called on every rank, once per checkpoint, when it learns of the commit; rank 0 learns first.
            on_copy: called on rank 0 when a checkpoint is uploaded, and on each rank whose upload failed.
        """
        self._root = root
        self._ranks = ranks
        self._config = config
        self._planner = SavePlanner(root, ranks, config.attempt)
        self.restore_context = RestoreContext(root, ranks, config.attempt, config.local, config.remote, config.fence)
        self._on_commit = on_commit
        self._deadline_missed = False
        self._newest_committed = 0
        self._num_saves = 0
        self._reported_steps: set[int] = set()
        buffers = 2 if config.device.type == "cuda" else 1
        self._staging_buffers = [
            StagingBuffer(root, config.device, config.local_world_size * buffers) for _ in range(buffers)
        ]
        worker = WriterClient(config.engine) if config.async_save else InlineRunner()
        self._pending = PendingSaves(worker, get_save_deadline, on_copy, has_remote=config.remote is not None)
        # A part on the node's own disk no longer occupies a staging buffer, so one more save can be pending.
        self._max_pending = len(self._staging_buffers) + (config.local is not None)

    def start(self) -> None:
        """Start the writer process before the first save. Not collective."""
        self._pending.worker.start()

    def reserve(self, state: StateTree, rank_state: StateTree | None = None) -> None:
        """Start to allocate memory for a save of ``state`` before the first save, without waiting."""
        shards = self._planner.plan_shards(state, rank_state or {}, error_prefix=f"{self._root}: nothing can be saved")
        for staging in self._staging_buffers:
            try:
                staging.reserve(shards)
            except OSError as e:  # the save raises it if it still fails then
                log.warning("no space for a copy of the state yet: %s", e)

    # -- save

    def save(
        self,
        step: int,
        state: StateTree,
        rank_state: StateTree | None = None,
        *,
        reason: SaveReason = "interval",
        metric: CheckpointMetric | None = None,
        wait: bool = False,
    ) -> SaveResult | None:
        """Begin a save. With ``wait``, or without a writer process, wait for its commit and return it.

        If an earlier pending save occupies the memory, wait for it first. A committed checkpoint of the same step is
        replaced only when the new one is committed.

        Raises:
            DeadlineExceeded: on every rank, at the deadline. Whether anything was committed is unknown.
            AttemptSuperseded: on every rank, if a newer attempt owns the run. Nothing was committed.
            StorageError: on every rank, if any rank could not write this save or a pending one. Nothing was committed,
                and older checkpoints are unchanged.
            CheckpointError: likewise, if the state cannot be saved.
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
        # A save that a stop or the end of the run waits for goes directly to the shared folder, where it counts.
        write = self._build_write_job(step, staged_save, buffer_index, use_local_tier=not wait)
        commit = self._build_commit_job(step, staged_save, reason, metric) if self._ranks.rank == 0 else None
        pending = PendingSave(write, commit, staging, started)
        if isinstance(staged_save.staged, Failure):
            pending.fail(staged_save.staged)
        self._pending.begin(pending)
        pending.stall_s = clock.monotonic() - started
        return self.wait_for_saves() if wait or not self._config.async_save else None

    def _wait_for_slot(self, reason: SaveReason) -> None:
        """Finish pending saves until one more fits."""
        while len(self._pending.waiting) >= self._max_pending:
            try:
                self._finish_oldest()
            except DeadlineExceeded:
                raise
            except CheckpointError as e:  # on all ranks alike
                if reason in ("interval", "best"):
                    raise
                log.warning("%s; continuing, since the save that is due now matters more", e)

    def _build_write_job(
        self, step: int, staged_save: StagedSave, buffer_index: int, *, use_local_tier: bool
    ) -> WriteJob:
        folder, staged = staged_save.folder, staged_save.staged
        local_root = self.restore_context.local_root if use_local_tier else None
        return WriteJob(
            step=step,
            folder=str(folder),
            rank=self._ranks.rank,
            engine=self._config.engine,
            buffer_index=buffer_index,
            segments=staged if isinstance(staged, list) else [],
            rank_values=staged_save.rank_values,
            local_folder=str(node_local.local_folder(local_root, folder.name)) if local_root is not None else "",
        )

    def _build_commit_job(
        self, step: int, staged_save: StagedSave, reason: SaveReason, metric: CheckpointMetric | None
    ) -> CommitJob:
        config = self._config
        return CommitJob(
            step=step,
            folder=str(staged_save.folder),
            root=str(self._root),
            engine=config.engine,
            world_size=self._ranks.world_size,
            torch=str(torch.__version__),
            layout=dict(config.layout),
            values=staged_save.rank_plan.values,
            reason=reason,
            metric=metric,
            about=dict(config.about),
            policy=config.policy,
            rank_timeout_s=RANK_TIMEOUT_S,
            fence=config.fence,
        )

    @property
    def num_pending(self) -> int:
        """Number of saves whose outcome this rank does not know."""
        return sum(not p.is_done() for p in self._pending.waiting)

    def wait_for_saves(self) -> SaveResult | None:
        """Wait until every save is committed, and return the last one.

        Raises:
            DeadlineExceeded, StorageError, CheckpointError: see :meth:`save`.
        """
        saved = None
        while self._pending.waiting:
            saved = self._finish_oldest()
        return saved

    def _finish_oldest(self) -> SaveResult:
        """Wait for the oldest save and exchange its outcome, so that it returns or raises on all ranks alike."""
        pending = self._pending.waiting[0]
        self._pending.wait_until(pending, lambda: pending.written is not None)
        own_failure = pending.written.failure if pending.written is not None else None
        failures = self._ranks.all_gather_failures(own_failure)
        if failures and pending.commit is not None:
            self._pending.worker.abort_commit(pending.step)
        self._pending.wait_until(pending, pending.is_done)
        self._pending.waiting.popleft()
        error_prefix = _not_saved_prefix(self._root, pending.step)
        deadline_passed = any(f.kind == "deadline" for f in failures)
        try:
            if failures:
                # At the deadline the file system may not respond; the next restore discards the folder.
                if not deadline_passed:
                    self._ranks.run_on_rank0(lambda: self._discard_folder(pending), error_prefix)
                raise error_from_failures(error_prefix, failures)
            size, written, save_s = self._ranks.run_on_rank0(lambda: _commit_result(pending), error_prefix)
        except DeadlineExceeded:
            deadline_passed = True
            raise
        finally:
            self._deadline_missed = self._deadline_missed or deadline_passed
        saved = self._build_result(pending, size, written, save_s)
        self._notify_commit(saved)
        return saved

    def _discard_folder(self, pending: PendingSave) -> None:
        folders.discard(Path(pending.write.folder))
        check_fence(self._config.fence)  # a newer attempt removes the folder that the ranks are writing to

    def _build_result(self, pending: PendingSave, size: int, written: int, save_s: float) -> SaveResult:
        reason = pending.commit.reason if pending.commit is not None else "interval"
        path = step_folder(self._root, pending.step)
        return SaveResult(pending.step, path, size, written, pending.stall_s, save_s, reason)

    def _notify_commit(self, saved: SaveResult) -> None:
        if saved.step not in self._reported_steps:
            self._reported_steps.add(saved.step)
            self._newest_committed = saved.step
            self._on_commit(saved)

    def poll(self) -> bool:
        """Return, without waiting, whether a save of this rank has failed.

        All ranks should then call :meth:`wait_for_saves`.
        """
        self._pending.poll_outcomes()
        for pending in self._pending.waiting:
            if pending.commit is not None and pending.committed is not None and pending.committed.failure is None:
                self._notify_commit(self._build_result(pending, *_commit_result(pending)))
        return any(p.failure is not None for p in self._pending.waiting)

    def close(self, timeout_s: float = 0.0, *, run_finished: bool = False) -> None:
        """Let the writer process end after its last job.

        Args:
            timeout_s: seconds to wait for it, so that the end of the Slurm job does not kill it early.
            run_finished: remove the node-local checkpoints, because nobody will restore them.
        """
        deadline = clock.monotonic() + (0.0 if self._deadline_missed else timeout_s)
        self._pending.drain(deadline, join=not self._deadline_missed)
        self.poll()
        self._pending.worker.close()
        for staging in self._staging_buffers:
            if not self._pending.is_in_use(staging):
                staging.close()
        local = self._config.local
        if run_finished and local is not None and local.is_node_leader and local.root is not None:
            node_local.remove_all(local.root)

    def wait_for_copies(self, should_continue: Callable[[], bool]) -> bool:
        """Wait until all committed checkpoints are uploaded, and return whether they are.

        Waiting ends early when ``should_continue()`` is False, or uploads keep failing. Not collective: each rank waits
        for its share, and rank 0 for all shares.
        """
        return self._pending.wait_for_copies(self._newest_committed, should_continue)

    # -- restore

    def restore(self, state: LoadableState, check_origin: OriginCheck = lambda origin: None) -> RestoreResult | None:
        """Load the newest valid checkpoint into ``state``, then start uploads.

        See :func:`~clustertrain.checkpoint.load.restore.restore_newest`.
        """
        restored = restore.restore_newest(self.restore_context, state, check_origin)
        if restored is not None:
            self._newest_committed = restored.step
        config = self._config
        if config.remote is not None:
            self._pending.worker.start_upload(
                UploadJob(
                    url=config.remote.url,
                    root=str(self._root),
                    rank=self._ranks.rank,
                    world_size=self._ranks.world_size,
                    attempt=config.attempt,
                    policy=config.remote.policy,
                    fence=config.fence,
                )
            )
        return restored

    def roll_back(self, state: LoadableState, target: RollbackTarget) -> RestoreResult | None:
        """Load the newest valid checkpoint before ``target`` into ``state``, and forget the newer ones.

        No save may be pending. See :func:`~clustertrain.checkpoint.load.restore.restore_before`.
        """
        restored = restore.restore_before(self.restore_context, state, target)
        self._reported_steps = {step for step in self._reported_steps if step <= target.max_step}
        self._newest_committed = restored.step if restored is not None else 0
        self._pending.limit_copied_upto(self._newest_committed)
        return restored


def _not_saved_prefix(root: Path, step: int) -> str:
    return f"{root}: the checkpoint of step {step} was not saved"


def _commit_result(pending: PendingSave) -> tuple[int, int, float]:
    """Return (bytes, written bytes, seconds since the start of the save), or raise CheckpointError."""
    outcome = pending.committed
    assert outcome is not None
    if outcome.failure is not None:
        raise error_from_failures("", [outcome.failure])
    return outcome.bytes, outcome.written, outcome.ended - pending.started
