"""Restore the newest valid checkpoint, and roll back. All functions that take a context are collective."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertrain import clock
from clustertrain.checkpoint.core.failures import Failure, error_from_failures, failure_from_exception
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.core.state_dict import LoadableState
from clustertrain.checkpoint.format import folders
from clustertrain.checkpoint.format.fence import Fence, check_fence
from clustertrain.checkpoint.format.manifest import (
    DamagedCheckpoint,
    Manifest,
    check_sizes,
    has_commit_marker,
    list_checkpoint_folders,
    parse_step,
    read_manifest,
    step_folder,
)
from clustertrain.checkpoint.format.storage import Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.load.reader import CheckpointReader, Finalizer
from clustertrain.checkpoint.load.rollback import PositionRanges, RollbackTarget
from clustertrain.checkpoint.save import node_local
from clustertrain.errors import CheckpointError, Diverged

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalTier:
    """The checkpoints on the nodes' own disks. Either all ranks have this tier or none has it."""

    root: Path | None
    """The run's folder on this node; None on a node without a suitable disk."""
    is_node_leader: bool
    """Whether this rank is the first one of its node."""


@dataclass(frozen=True)
class RemoteTier:
    """The copies of committed checkpoints at a URL."""

    url: str
    policy: RetentionPolicy
    """Which copies to keep."""
    is_required: bool
    """Whether earlier attempts have committed checkpoints, so that a restore must find one."""


@dataclass(frozen=True)
class RestoreContext:
    """The parameters of a restore, besides the state to load."""

    root: Path
    ranks: Ranks
    attempt: str
    local: LocalTier | None = None
    remote: RemoteTier | None = None
    fence: Fence | None = None

    @property
    def local_root(self) -> Path | None:
        return self.local.root if self.local is not None else None

    def open_remote_root(self) -> RemoteFolder | None:
        """Return the folder of the copies, or None without a remote tier.

        Raises:
            StorageError: it cannot be opened.
        """
        return RemoteFolder(self.remote.url) if self.remote is not None else None


@dataclass(frozen=True)
class RestoreResult:
    """A restored checkpoint."""

    step: int
    path: Folder
    """A local folder, or a remote one."""
    rank_state: Any
    """None if a different number of ranks saved the checkpoint."""
    restore_s: float
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """Newer checkpoints that were damaged: ``[{"step", "path", "reason"}]``."""
    from_local: int | None = None
    """Bytes that all ranks read from their nodes' own disks, on rank 0; None without a local tier."""


@dataclass(frozen=True)
class CheckpointOrigin:
    """The circumstances under which a checkpoint was saved."""

    layout: Mapping[str, Any]
    world_size: int
    torch: str
    about: Mapping[str, Any]
    """As in the :class:`~clustertrain.checkpoint.manager.CheckpointConfig` of the manager that saved it."""


OriginCheck = Callable[[CheckpointOrigin], None]


def restore_newest(ctx: RestoreContext, state: LoadableState, check_origin: OriginCheck) -> RestoreResult | None:
    """Load the newest valid checkpoint into ``state``. Return None if there is no checkpoint at all.

    Newer checkpoints that are damaged are renamed to ``damaged-step-…``: kept as evidence until a newer checkpoint is
    committed, but never restored or counted again.

    Args:
        check_origin: called before anything is loaded. It is collective and must raise on all ranks or on none.

    Raises:
        CheckpointError: no checkpoint is valid, or the newest valid one was saved from different objects.
        StorageError: on every rank, if any rank could not read. No checkpoint counts as damaged then.
    """
    ctx.ranks.run_on_rank0(lambda: _clean_up(ctx), f"{ctx.root}: cannot be used for checkpoints")
    return _restore_newest_valid(ctx, state, check_origin)


def restore_before(ctx: RestoreContext, state: LoadableState, target: RollbackTarget) -> RestoreResult | None:
    """Load the newest valid checkpoint of at most ``target.max_step`` steps into ``state``; invalidate newer ones.

    Raises:
        Diverged: see :func:`invalidate`.
        CheckpointError, StorageError: see :func:`restore_newest`.
    """
    invalidate(ctx, target)
    ctx.ranks.run_on_rank0(lambda: _clean_up(ctx), f"{ctx.root}: the run cannot roll back")
    return _restore_newest_valid(ctx, state, lambda origin: None)  # checked by this attempt's first restore


def invalidate(ctx: RestoreContext, target: RollbackTarget) -> int:
    """Record a rollback for the next restore to carry out, and return the newest step that stays valid.

    No save may be pending, because its checkpoint would be missing from the record.

    Raises:
        Diverged: on all ranks, if the run has rolled back too often, or no checkpoint is old enough.
    """
    outcome = ctx.ranks.run_on_rank0(lambda: _record_rollback(ctx, target), f"{ctx.root}: the run cannot roll back")
    if "newest_valid" not in outcome:
        raise Diverged(outcome["message"], fix=outcome["fix"])
    newest_valid: int = outcome["newest_valid"]
    return newest_valid


def excluded_ranges(ctx: RestoreContext) -> PositionRanges:
    """Return the ranges of positions that rollbacks exclude, by the loader's name in the state."""
    ranges: PositionRanges = ctx.ranks.run_on_rank0(
        lambda: rollback.excluded_ranges(ctx.root), f"{ctx.root}: the record of rollbacks cannot be read"
    )
    return ranges


def metric_values_if_missing(ctx: RestoreContext, step: int, name: str) -> dict[int, float] | None:
    """Return the values of the metric ``name`` in the checkpoints, by step, if that of ``step`` no longer exists.

    Return None if it exists.
    """
    values = ctx.ranks.run_on_rank0(
        lambda: _metric_values_if_missing(ctx, step, name), f"{ctx.root}: the checkpoints cannot be listed"
    )
    return None if values is None else {int(step): float(value) for step, value in values}


def _metric_values_if_missing(ctx: RestoreContext, target_step: int, name: str) -> list[tuple[int, float]] | None:
    candidates = _list_candidates(ctx)
    if any(step == target_step for step, _ in candidates):
        return None
    values = []
    for step, in_shared in candidates:
        try:
            metric = read_manifest(_checkpoint_folder(ctx, step, in_shared=in_shared)).metric
        except DamagedCheckpoint:
            continue
        if metric is not None and metric.name == name and metric.value is not None:
            values.append((step, metric.value))
    return values


def _record_rollback(ctx: RestoreContext, target: RollbackTarget) -> dict[str, Any]:
    try:
        newest_valid = rollback.record_rollback(ctx.root, ctx.open_remote_root(), target, ctx.fence)
    except Diverged as e:  # returned, so that run_on_rank0 passes it on to the other ranks
        return {"message": e.message, "fix": e.fix}
    return {"newest_valid": newest_valid}


def _clean_up(ctx: RestoreContext) -> None:
    folders.sweep(ctx.root, ctx.fence)
    rollback.apply_records(ctx.root, ctx.open_remote_root())


# -- loading


@dataclass
class _Candidate:
    """A checkpoint that this rank tries to load."""

    step: int
    folder: Folder
    manifest: Manifest | None = None
    local_reader: node_local.LocalTierReader | None = None
    reader: CheckpointReader | None = None
    finish: Finalizer | None = None
    rank_state: Any = None
    failure: Failure | None = None
    mismatch: CheckpointError | None = None

    def record_error(self, e: CheckpointError) -> None:
        """Store ``e`` for the next exchange of failures, in which all ranks take part."""
        if isinstance(e, (DamagedCheckpoint, StorageError)):
            self.failure = failure_from_exception(e)
        else:
            self.failure, self.mismatch = Failure(message=e.message, kind="objects"), e


def _restore_newest_valid(ctx: RestoreContext, state: LoadableState, check_origin: OriginCheck) -> RestoreResult | None:
    started = clock.monotonic()
    candidates = ctx.ranks.run_on_rank0(lambda: _list_candidates(ctx), f"{ctx.root}: the checkpoints cannot be listed")
    skipped: list[dict[str, Any]] = []
    for step, in_shared in reversed(candidates):
        candidate = _Candidate(step, _checkpoint_folder(ctx, step, in_shared=in_shared))
        failures = _read_manifest(ctx, candidate)
        if not failures and candidate.manifest is not None:
            check_origin(_origin(candidate.manifest))
            _begin_load(ctx, candidate, candidate.manifest, state)
            failures = _complete_load(ctx, candidate)
        if not failures:
            return _finish_restore(ctx, candidate, started, skipped)
        _raise_unless_damaged(candidate, failures)
        reason = "; ".join(f.message for f in failures)
        skipped.append({"step": step, "path": str(candidate.folder), "reason": reason})
    if skipped:
        reasons = "\n  ".join(s["reason"] for s in skipped)
        raise CheckpointError(
            f"{ctx.root}: no checkpoint is valid:\n  {reasons}",
            fix="restore the files, or move the checkpoints away to start over",
        )
    return None


def _origin(manifest: Manifest) -> CheckpointOrigin:
    return CheckpointOrigin(manifest.layout, manifest.world_size, manifest.torch, manifest.about)


def _read_manifest(ctx: RestoreContext, candidate: _Candidate) -> list[Failure]:
    """Read the manifest, and return the failures of all ranks."""
    try:
        candidate.manifest = read_manifest(candidate.folder)
        check_sizes(candidate.folder, candidate.manifest)
    except CheckpointError as e:
        candidate.record_error(e)
    return ctx.ranks.all_gather_failures(candidate.failure)


def _begin_load(ctx: RestoreContext, candidate: _Candidate, manifest: Manifest, state: LoadableState) -> None:
    """Start reading this rank's shards."""
    try:
        if ctx.local_root is not None:
            candidate.local_reader = node_local.LocalTierReader(ctx.local_root, manifest.made_in)
        candidate.reader = CheckpointReader(candidate.folder, manifest, ctx.ranks, candidate.local_reader)
        candidate.finish = candidate.reader.load(state)
        if manifest.world_size == ctx.ranks.world_size:
            candidate.rank_state = candidate.reader.rank_state(ctx.ranks.rank)
    except CheckpointError as e:
        candidate.record_error(e)


def _complete_load(ctx: RestoreContext, candidate: _Candidate) -> list[Failure]:
    """Wait for all reads, and return the failures of all ranks."""
    try:
        failures = ctx.ranks.all_gather_failures(candidate.failure)
        if not failures and candidate.reader is not None:
            failures = ctx.ranks.all_gather_failures(_complete(candidate.reader))
    finally:
        if candidate.reader is not None:
            candidate.reader.close()
    return failures


def _complete(reader: CheckpointReader) -> Failure | None:
    try:
        reader.complete()
    except (DamagedCheckpoint, StorageError) as e:
        return failure_from_exception(e)
    return None


def _raise_unless_damaged(candidate: _Candidate, failures: list[Failure]) -> None:
    """Raise unless all failures are damage, the only reason to try an older checkpoint."""
    if candidate.mismatch is not None:
        raise candidate.mismatch
    if any(f.kind == "objects" for f in failures):
        raise error_from_failures(f"{candidate.folder}: cannot be loaded", [f for f in failures if f.kind == "objects"])
    if any(f.kind != "state" for f in failures):
        raise error_from_failures(f"{candidate.folder}: cannot be read", failures)


def _finish_restore(
    ctx: RestoreContext, candidate: _Candidate, started: float, skipped: list[dict[str, Any]]
) -> RestoreResult:
    assert candidate.finish is not None and candidate.manifest is not None
    candidate.finish()
    ctx.ranks.run_on_rank0(lambda: _set_aside(ctx, skipped), "damaged checkpoints cannot be set aside")
    restore_s, from_local = clock.monotonic() - started, None
    if ctx.local is not None:
        if ctx.local.is_node_leader and ctx.local.root is not None:  # no other checkpoint there is needed anymore
            node_local.remove_stale(ctx.local.root, candidate.manifest.made_in, ctx.attempt)
        from_local = sum(ctx.ranks.gather(candidate.local_reader.bytes_read if candidate.local_reader else 0))
    return RestoreResult(candidate.step, candidate.folder, candidate.rank_state, restore_s, skipped, from_local)


def _set_aside(ctx: RestoreContext, skipped: list[dict[str, Any]]) -> None:
    check_fence(ctx.fence)
    folders.mark_damaged(skipped)


def _list_candidates(ctx: RestoreContext) -> list[tuple[int, bool]]:
    """Return (step, whether it is in the shared folder) of each checkpoint, oldest first.

    A checkpoint in both places comes twice, the shared one last, so that it is tried first.
    """
    # A folder gets this name only after its commit marker, so one without a marker is damaged, not unfinished.
    shared_steps = [parse_step(p) or 0 for p in list_checkpoint_folders(ctx.root)]
    remote_steps: list[int] = []
    if ctx.remote is not None:
        try:
            committed = [
                (parse_step(p) or 0, p)
                for p in list_checkpoint_folders(RemoteFolder(ctx.remote.url))
                if has_commit_marker(p)
            ]
            remote_steps = [step for step, p in committed if rollback.is_valid(ctx.root, p, step)]
        except StorageError as e:
            if ctx.remote.is_required and not shared_steps:
                raise
            log.warning("%s; its checkpoints are ignored", e.message)
    return sorted([*((s, True) for s in shared_steps), *((s, False) for s in remote_steps)])


def _checkpoint_folder(ctx: RestoreContext, step: int, *, in_shared: bool) -> Folder:
    if in_shared:
        return step_folder(ctx.root, step)
    assert ctx.remote is not None
    return step_folder(RemoteFolder(ctx.remote.url), step)
