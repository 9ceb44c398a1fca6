"""The record of a run's rollbacks, next to its checkpoints: invalidated checkpoints and excluded samples.

The record is written durably before anything else is done. Every later attempt carries it out, so the run may be killed
at any point. A checkpoint is identified by its commit marker, because after a rollback the run saves the same step
again with a different marker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from clustertrain import fsio, reading
from clustertrain.checkpoint.core import fault_points, retention
from clustertrain.checkpoint.format.fence import Fence, check_fence
from clustertrain.checkpoint.format.manifest import COMMITTED, list_checkpoint_folders, parse_step, step_folder
from clustertrain.checkpoint.format.storage import F, Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError, with_retries
from clustertrain.errors import CheckpointError, Diverged
from clustertrain.run.rollback_record import (
    UNREADABLE_FIX,
    PositionRanges,
    RollbackRecord,
    decode_records,
    list_invalidated,
)
from clustertrain.run.run_dir import ROLLED_BACK_FILE

log = logging.getLogger(__name__)

RECORD_FILE = ROLLED_BACK_FILE


def read_records(root: Path) -> list[RollbackRecord]:
    """Return the records, oldest first.

    Raises:
        CheckpointError: the record cannot be read. Without it the run would resume from an invalidated checkpoint and
            train on excluded samples.
    """
    path = root / RECORD_FILE
    try:
        data = with_retries(lambda: reading.read_bytes(path), path)
    except FileNotFoundError:
        return []
    except StorageError as e:
        if isinstance(e.__cause__, reading.UnusableFile):  # a folder or a device, which no retry changes
            raise CheckpointError(e.message, fix=UNREADABLE_FIX) from e
        raise
    try:
        return decode_records(data)
    except msgspec.MsgspecError as e:
        raise CheckpointError(f"{path}: cannot be read: {e}", fix=UNREADABLE_FIX) from e


def find_record_error(root: Folder) -> str | None:
    """Return why the record in ``root`` cannot be read; None if it is readable or absent."""
    try:
        if isinstance(root, Path):
            read_records(root)
    except CheckpointError as e:
        return e.message
    return None


def excluded_ranges(root: Path) -> PositionRanges:
    """Return the excluded ranges of positions of all rollbacks, by the loader's name in the state."""
    merged: PositionRanges = {}
    for record in read_records(root):
        for name, ranges in record.excluded.items():
            merged.setdefault(name, []).extend(ranges)
    return merged


class RollbackTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A rollback to carry out."""

    last_step: int
    """The last step that went wrong."""
    max_step: int
    """Return to a checkpoint of at most this step."""
    reason: str
    excluded: PositionRanges
    """Ranges of positions to exclude, by the loader's name in the state."""
    max_rollbacks: int
    """Rollbacks allowed without progress between them."""


def record_rollback(root: Path, remote: RemoteFolder | None, target: RollbackTarget, fence: Fence | None = None) -> int:
    """Record a rollback before it is carried out, and return the newest step that stays valid.

    Raises:
        AttemptSuperseded: a newer attempt owns the run and its record.
        Diverged: no checkpoint is old enough, or the run has rolled back too often.
    """
    previous, reason, max_step = read_records(root), target.reason, target.max_step
    candidates = _list_markers(root)
    if remote is not None:
        try:
            candidates += [pair for pair in _list_markers(remote) if pair not in candidates]
        except CheckpointError as e:
            log.warning("%s; its checkpoints are ignored", e.message)
    remaining_steps = [step for step, _ in candidates if step <= max_step]
    if not remaining_steps:
        raise Diverged(
            f"{reason}: there is no checkpoint of step {max_step} or earlier to return to",
            fix="save more often with checkpoint.every, or keep more checkpoints",
        )
    has_progressed = not previous or any(step > previous[-1].last_step for step, _ in candidates)
    count = 1 if has_progressed else previous[-1].count + 1
    if count > target.max_rollbacks:
        raise Diverged(
            f"{reason}: the run has rolled back {count - 1} times since it last got past step {previous[-1].last_step}"
            if previous
            else f"{reason}: stability.max_roll_backs = 0",
            fix="lower the learning rate, lengthen the warmup, or clip at a lower norm; `clustertrain requeue` then "
            "continues from the newest checkpoint",
        )
    invalidated = tuple((step, marker) for step, marker in candidates if step > max_step)
    record = RollbackRecord(
        last_step=target.last_step,
        max_step=max_step,
        reason=reason,
        count=count,
        excluded=target.excluded,
        invalidated=invalidated,
    )
    fault_points.fault_point("before_rollback_record", 0)
    check_fence(fence)
    fsio.write_bytes(root / RECORD_FILE, msgspec.json.encode([*previous, record]))
    fault_points.fault_point("after_rollback_record", 0)
    return max(remaining_steps)


def apply_records(root: Path, remote: RemoteFolder | None) -> None:
    """Delete the invalidated checkpoints that still exist; for a remote copy, only the commit marker."""
    for step, marker in _invalidated_markers(root):
        folder = step_folder(root, step)
        if retention.read_marker(folder) == marker:
            retention.delete_checkpoint(folder, marker)
            fault_points.fault_point("between_invalidated_checkpoints", 0)
        if remote is not None:
            remote_folder = step_folder(remote, step)
            try:
                if retention.read_marker(remote_folder) == marker:
                    (remote_folder / COMMITTED).unlink()
            except (OSError, CheckpointError) as e:  # a restore also consults the record
                log.warning("%s is invalid and could not be deleted: %s", remote_folder, e)


def list_valid_folders(root: F) -> list[F]:
    """Return the checkpoint folders in ``root`` that are not invalidated, committed or not, oldest first.

    A remote ``root`` has no record, so all its folders count.
    """
    folders = list_checkpoint_folders(root)
    if not isinstance(root, Path):
        return folders
    return [p for p in folders if is_valid(root, p, parse_step(p) or 0)]


def list_readable_folders(root: F) -> list[F]:
    """Return the folders of :func:`list_valid_folders`, or all if the record cannot be read: for reading only."""
    return list_valid_folders(root) if find_record_error(root) is None else list_checkpoint_folders(root)


def is_valid(root: Path, folder: Folder, step: int) -> bool:
    """Return whether the record in ``root`` does not invalidate ``folder``, which may be remote."""
    markers = {marker for s, marker in _invalidated_markers(root) if s == step}
    return not markers or retention.read_marker(folder) not in markers


def _invalidated_markers(root: Path) -> Sequence[tuple[int, str]]:
    return list_invalidated(read_records(root))


def _list_markers(root: Path | RemoteFolder) -> list[tuple[int, str]]:
    pairs = [(parse_step(p) or 0, retention.read_marker(p)) for p in list_checkpoint_folders(root)]
    return [(step, marker) for step, marker in pairs if marker is not None]
