"""Restore the newest valid checkpoint, and roll back. All functions that take a context are collective."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertrain import clock
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.core.failures import Failure, error_from_failures, failure_from_exception
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.core.state_dict import LoadableState
from clustertrain.checkpoint.format import folders
from clustertrain.checkpoint.format.fence import Fence, check_fence
from clustertrain.checkpoint.format.manifest import (
    DamagedCheckpoint,
    Manifest,
    check_sizes,
    is_committed,
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
    """The checkpoints on the nodes' own disks. Either all ranks have this tier or none has."""

    root: Path | None
    """The run's folder on this node; None on a node without a suitable disk."""
    is_node_leader: bool
    """This rank is the first of its node."""


@dataclass(frozen=True)
class RemoteTier:
    """The copies of committed checkpoints at a URL."""

    url: str
    policy: RetentionPolicy
    """Which copies to keep."""
    is_required: bool
    """Earlier attempts have committed checkpoints, so a restore that finds none must not start the run over."""


@dataclass(frozen=True)
class RestoreContext:
    """What a restore needs besides the state to restore."""

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
        """Return the folder of the copies, or None without a remote tier. Raise StorageError if it cannot be opened."""
        return RemoteFolder(self.remote.url) if self.remote is not None else None


@dataclass(frozen=True)
class RestoreResult:
    """A restored checkpoint."""

    step: int
    path: Folder
    """A local folder, or a remote one."""
    rank_state: Any
    """None if another number of ranks saved the checkpoint."""
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
    """Load the newest valid checkpoint into ``state``, and return None if there is no checkpoint at all.

    ``check_origin`` is called before anything is loaded. It is collective and must raise on all ranks or on none.

    Newer checkpoints that are damaged are renamed to ``damaged-step-…``: kept as evidence until a newer checkpoint is
    committed, but never restored or counted again.

    Raises:
        CheckpointError: no checkpoint is valid, or the newest valid one was saved from other objects.
        StorageError: on every rank, if any of them could not read. Nothing counts as damaged then.
    """
    ctx.ranks.run_on_rank0(lambda: _clean_up(ctx), f"{ctx.root}: cannot be used for checkpoints")
    return _restore_newest_valid(ctx, state, check_origin)


def restore_before(ctx: RestoreContext, state: LoadableState, target: RollbackTarget) -> RestoreResult | None:
    """Load the newest valid checkpoint of at most ``target.max_step`` steps into ``state``; invalidate newer ones.

    Raises:
        Diverged: as :func:`invalidate`.
        CheckpointError, StorageError: as :func:`restore_newest`.
    """
    invalidate(ctx, target)
    ctx.ranks.run_on_rank0(lambda: _clean_up(ctx), f"{ctx.root}: the run cannot go back")
    return _restore_newest_valid(ctx, state, lambda origin: None)  # checked by this attempt's first restore


def invalidate(ctx: RestoreContext, target: RollbackTarget) -> int:
    """Record that the run rolls back, for the next restore to carry out; return the newest step that stays valid.

    No save may be pending: its checkpoint would be missing from the record.

    Raises:
        Diverged: on all ranks, if the run has rolled back too often, or no checkpoint is old enough.
    """
    outcome = ctx.ranks.run_on_rank0(lambda: _record_rollback(ctx, target), f"{ctx.root}: the run cannot go back")
    if "newest_left" not in outcome:
        raise Diverged(outcome["message"], fix=outcome["fix"])
    newest_left: int = outcome["newest_left"]
    return newest_left


def excluded_ranges(ctx: RestoreContext) -> PositionRanges:
    """Return the ranges of positions that roll-backs exclude, by the loader's name in the state."""
    ranges: PositionRanges = ctx.ranks.run_on_rank0(
        lambda: rollback.excluded_ranges(ctx.root), f"{ctx.root}: the record of roll-backs cannot be read"
    )
    return ranges


def metric_values_if_missing(ctx: RestoreContext, step: int, name: str) -> dict[int, float] | None:
    """Return None if the checkpoint of ``step`` can be restored; otherwise the values of the metric ``name`` in those
    that can, by step."""
    values = ctx.ranks.run_on_rank0(
        lambda: _metric_values_if_missing(ctx, step, name), f"{ctx.root}: the checkpoints cannot be listed"
    )
    return None if values is None else {int(step): float(value) for step, value in values}


def _metric_values_if_missing(ctx: RestoreContext, wanted_step: int, name: str) -> list[tuple[int, float]] | None:
    candidates = _list_candidates(ctx)
    if any(step == wanted_step for step, _ in candidates):
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
        newest_left = rollback.record_rollback(ctx.root, ctx.open_remote_root(), target, ctx.fence)
    except Diverged as e:  # returned, so that run_on_rank0 passes it on to the other ranks
        return {"message": e.message, "fix": e.fix}
    return {"newest_left": newest_left}


def _clean_up(ctx: RestoreContext) -> None:
    folders.sweep(ctx.root, ctx.fence)
    rollback.apply_records(ctx.root, ctx.open_remote_root())


# -- loading one checkpoint after the other


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
        """Keep ``e`` for the next exchange of failures, which the other ranks wait for."""
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
            f"{ctx.root}: no checkpoint verifies:\n  {reasons}",
            fix="restore the files, or move the checkpoints away to begin again",
        )
    return None


def _origin(manifest: Manifest) -> CheckpointOrigin:
    return CheckpointOrigin(manifest.layout, manifest.world_size, manifest.torch, manifest.about)


def _read_manifest(ctx: RestoreContext, candidate: _Candidate) -> list[Failure]:
    """Read the manifest; return the failures of all ranks."""
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
    """Wait for all reads; return the failures of all ranks."""
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
        if ctx.local.is_node_leader and ctx.local.root is not None:  # no other checkpoint there is needed any more
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
                if is_committed(p)
            ]
            remote_steps = [step for step, p in committed if rollback.is_valid(ctx.root, p, step)]
        except StorageError as e:
            if ctx.remote.is_required and not shared_steps:
                raise
            log.warning("%s; not searched for newer checkpoints", e.message)
    return sorted([*((s, True) for s in shared_steps), *((s, False) for s in remote_steps)])


def _checkpoint_folder(ctx: RestoreContext, step: int, *, in_shared: bool) -> Folder:
    if in_shared:
        return step_folder(ctx.root, step)
    assert ctx.remote is not None
    return step_folder(RemoteFolder(ctx.remote.url), step)
