"""Restore, and the way back, all ranks together: which checkpoint, and whether every byte of it was good."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertrain import clock
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.core.failures import Failure, error_from_failures, failure_from_exception
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format import fence as fences
from clustertrain.checkpoint.format import folders
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.fence import Fence
from clustertrain.checkpoint.format.manifest import DamagedCheckpoint, Manifest
from clustertrain.checkpoint.format.storage import Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.load.reader import CheckpointReader, Finalizer
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.checkpoint.save import node_local as local_tier
from clustertrain.errors import CheckpointError, Diverged

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoreResult:
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
class CheckpointOrigin:
    """How a checkpoint was made; ``about`` as it was given to the manager that saved it."""

    layout: Mapping[str, Any]
    world_size: int
    torch: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class LocalTier:
    """The tier on the nodes' own disks. All ranks have one or none has; ``root`` is None where this node has no such
    disk."""

    root: Path | None
    is_node_leader: bool  # this rank is the first of its node


@dataclass(frozen=True)
class RemoteTier:
    """Where copies go, as many as ``policy`` says. ``is_required``: there may be one without which the run would begin
    again."""

    url: str
    policy: RetentionPolicy
    is_required: bool


OriginCheck = Callable[[CheckpointOrigin], None]


@dataclass
class _Candidate:
    """A checkpoint, as far as this rank has come with loading it, and what spoke against that."""

    step: int
    folder: Folder
    manifest: Manifest | None = None
    local_reader: local_tier.LocalTierReader | None = None
    reader: CheckpointReader | None = None
    finish: Finalizer | None = None
    rank_state: Any = None
    failure: Failure | None = None
    mismatch: CheckpointError | None = None

    def record_error(self, e: CheckpointError) -> None:
        """The other ranks must hear of it: they wait for this one's word."""
        if isinstance(e, (DamagedCheckpoint, StorageError)):
            self.failure = failure_from_exception(e)
        else:
            self.failure, self.mismatch = Failure(why=e.message, of="objects"), e


class Restorer:
    def __init__(
        self,
        root: Path,
        ranks: Ranks,
        attempt: str,
        local: LocalTier | None,
        remote: RemoteTier | None,
        fence: Fence | None = None,
    ) -> None:
        self._root = root
        self._ranks = ranks
        self._attempt = attempt
        self._local = local
        self._local_root = local.root if local is not None else None
        self._remote = remote
        self._fence = fence

    def restore_newest(self, state: dict[str, Any], check_origin: OriginCheck) -> RestoreResult | None:
        """As :meth:`CheckpointManager.restore`."""
        self._ranks.run_on_rank0(self._clean_up, f"{self._root}: cannot be used for checkpoints")
        return self._restore_newest_valid(state, check_origin)

    def restore_before(self, state: dict[str, Any], target: RollbackTarget) -> RestoreResult | None:
        """As :meth:`CheckpointManager.roll_back`."""
        self.invalidate(target)
        self._ranks.run_on_rank0(self._clean_up, f"{self._root}: the run cannot go back")
        return self._restore_newest_valid(state, lambda origin: None)  # the restore before has asked

    def invalidate(self, target: RollbackTarget) -> int:
        """As :meth:`CheckpointManager.invalidate`."""
        outcome = self._ranks.run_on_rank0(
            lambda: self._record_rollback(target), f"{self._root}: the run cannot go back"
        )
        if "left" not in outcome:
            raise Diverged(outcome["message"], fix=outcome["fix"])
        newest_left: int = outcome["left"]
        return newest_left

    def excluded_ranges(self) -> rollback.PositionRanges:
        """As :meth:`CheckpointManager.excluded_ranges`."""
        ranges: rollback.PositionRanges = self._ranks.run_on_rank0(
            lambda: rollback.excluded_ranges(self._root), f"{self._root}: the record of roll-backs cannot be read"
        )
        return ranges

    def metric_values_if_missing(self, step: int, name: str) -> dict[int, float] | None:
        """As :meth:`CheckpointManager.metric_values_if_missing`."""
        values = self._ranks.run_on_rank0(
            lambda: self._metric_values_if_missing(step, name), f"{self._root}: the checkpoints cannot be listed"
        )
        return None if values is None else {int(step): float(value) for step, value in values}

    def _metric_values_if_missing(self, wanted_step: int, name: str) -> list[tuple[int, float]] | None:
        candidates = self._list_candidates()
        if any(step == wanted_step for step, _ in candidates):
            return None
        values = []
        for step, in_shared in candidates:
            try:
                metric = index.read_manifest(self._checkpoint_folder(step, in_shared=in_shared)).metric
            except DamagedCheckpoint:
                continue
            if metric is not None and metric.name == name and metric.value is not None:
                values.append((step, metric.value))
        return values

    def _record_rollback(self, target: RollbackTarget) -> dict[str, Any]:
        try:
            newest_left = rollback.record_rollback(
                self._root, self._remote_root() if self._remote is not None else None, target, self._fence
            )
        except Diverged as e:  # the other ranks must hear of it
            return {"message": e.message, "fix": e.fix}
        return {"left": newest_left}

    def _clean_up(self) -> None:
        folders.sweep(self._root, self._fence)
        rollback.apply_records(self._root, self._remote_root() if self._remote is not None else None)

    def _set_aside(self, skipped: list[dict[str, Any]]) -> None:
        fences.check_fence(self._fence)
        folders.mark_damaged(skipped)

    def _restore_newest_valid(self, state: dict[str, Any], check_origin: OriginCheck) -> RestoreResult | None:
        started = clock.monotonic()
        candidates = self._ranks.run_on_rank0(self._list_candidates, f"{self._root}: the checkpoints cannot be listed")
        skipped: list[dict[str, Any]] = []
        for step, in_shared in reversed(candidates):
            folder = self._checkpoint_folder(step, in_shared=in_shared)
            candidate = _Candidate(step, folder)
            failures = self._read_manifest(candidate)
            if not failures and candidate.manifest is not None:
                check_origin(
                    CheckpointOrigin(
                        candidate.manifest.layout,
                        candidate.manifest.world_size,
                        candidate.manifest.torch,
                        candidate.manifest.about,
                    )
                )
                self._begin_load(candidate, candidate.manifest, state)
                failures = self._complete_load(candidate)
            if not failures:
                return self._finish_restore(candidate, started, skipped)
            _raise_unless_damaged(candidate, failures)
            skipped.append({"step": step, "path": str(folder), "why": "; ".join(t.why for t in failures)})
        if skipped:
            reasons = "\n  ".join(s["why"] for s in skipped)
            raise CheckpointError(
                f"{self._root}: no checkpoint verifies:\n  {reasons}",
                fix="restore the files, or move the checkpoints away to begin again",
            )
        return None

    def _read_manifest(self, candidate: _Candidate) -> list[Failure]:
        """What any rank has against its index."""
        try:
            candidate.manifest = index.read_manifest(candidate.folder)
            index.check_sizes(candidate.folder, candidate.manifest)
        except CheckpointError as e:
            candidate.record_error(e)
        return self._ranks.all_gather_failures(candidate.failure)

    def _begin_load(self, candidate: _Candidate, manifest: Manifest, state: dict[str, Any]) -> None:
        """Begin to read what this rank needs of it."""
        try:
            candidate.local_reader = (
                local_tier.LocalTierReader(self._local_root, manifest.made_in) if self._local_root is not None else None
            )
            candidate.reader = CheckpointReader(candidate.folder, manifest, self._ranks, candidate.local_reader)
            candidate.finish = candidate.reader.load(state)
            if manifest.world_size == self._ranks.world_size:
                candidate.rank_state = candidate.reader.rank_state(self._ranks.rank)
        except CheckpointError as e:
            candidate.record_error(e)

    def _complete_load(self, candidate: _Candidate) -> list[Failure]:
        """What went wrong on any rank."""
        try:
            failures = self._ranks.all_gather_failures(candidate.failure)
            if not failures and candidate.reader is not None:
                failures = self._ranks.all_gather_failures(_complete(candidate.reader))
        finally:
            if candidate.reader is not None:
                candidate.reader.close()
        return failures

    def _finish_restore(self, candidate: _Candidate, started: float, skipped: list[dict[str, Any]]) -> RestoreResult:
        assert candidate.finish is not None and candidate.manifest is not None
        candidate.finish()
        self._ranks.run_on_rank0(lambda: self._set_aside(skipped), "damaged checkpoints cannot be set aside")
        restored = RestoreResult(
            candidate.step, candidate.folder, candidate.rank_state, clock.monotonic() - started, skipped
        )
        if self._local is None:
            return restored
        if self._local.is_node_leader and self._local_root is not None:  # nothing else there is worth keeping now
            local_tier.remove_stale(self._local_root, candidate.manifest.made_in, self._attempt)
        return dataclasses.replace(
            restored,
            from_local=sum(self._ranks.gather(candidate.local_reader.bytes_read if candidate.local_reader else 0)),
        )

    def _list_candidates(self) -> list[tuple[int, bool]]:
        """What can be restored, the oldest first: the step, and whether it is here or only behind the URL. Here is
        after there, where it is in both."""
        # A folder has this name only when its marker is there: one without is damaged, not unfinished.
        shared_steps = [index.parse_step(p) or 0 for p in index.list_checkpoint_folders(self._root)]
        remote_steps: list[int] = []
        if self._remote is not None:
            try:
                committed = [
                    (index.parse_step(p) or 0, p)
                    for p in index.list_checkpoint_folders(self._remote_root())
                    if index.is_committed(p)
                ]
                remote_steps = [step for step, p in committed if rollback.is_valid(self._root, p, step)]
            except StorageError as e:
                if self._remote.is_required and not shared_steps:
                    raise
                log.warning("%s; not looked at for newer checkpoints", e.message)
        return sorted([*((s, True) for s in shared_steps), *((s, False) for s in remote_steps)])

    def _checkpoint_folder(self, step: int, *, in_shared: bool) -> Folder:
        return index.step_folder(self._root, step) if in_shared else index.step_folder(self._remote_root(), step)

    def _remote_root(self) -> RemoteFolder:
        assert self._remote is not None
        return RemoteFolder(self._remote.url)


def _complete(reader: CheckpointReader) -> Failure | None:
    try:
        reader.complete()
    except (DamagedCheckpoint, StorageError) as e:
        return failure_from_exception(e)
    return None


def _raise_unless_damaged(candidate: _Candidate, failures: list[Failure]) -> None:
    """Only what is damaged is passed over for an older one."""
    if candidate.mismatch is not None:
        raise candidate.mismatch
    if any(f.of == "objects" for f in failures):
        raise error_from_failures(f"{candidate.folder}: cannot be loaded", [t for t in failures if t.of == "objects"])
    if any(t.of != "state" for t in failures):
        raise error_from_failures(f"{candidate.folder}: cannot be read", failures)
