"""Decides which checkpoints to keep and which to delete.

:func:`select_for_deletion` is the policy; :func:`list_expired` and :func:`delete_expired` apply it to a folder. A
checkpoint is kept if any of these holds:

* it is the newest valid one (``is_valid`` of :func:`list_expired`): the run resumes from it if all newer ones are
  damaged;
* it is one of the ``keep`` newest regular ones. A checkpoint saved only for its metric is not regular, because frequent
  evaluations would displace all older ones; it counts only while there are fewer than ``keep`` regular ones;
* its step is a multiple of ``keep_every``: these are never deleted;
* it is one of the ``keep_best`` best;
* it is an emergency checkpoint (saved at a stop) and there is no newer regular one. It never displaces a regular one.
  If a run is stopped repeatedly before a regular checkpoint is due, only the ``keep`` newest stay, because otherwise
  the disk would fill.

Folders without a commit marker are not touched: a save may be pending.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clustertrain import fsio, reading
from clustertrain.checkpoint.format.fence import Fence, check_fence
from clustertrain.checkpoint.format.manifest import (
    COMMITTED,
    CheckpointMetric,
    SaveReason,
    check_sizes,
    has_commit_marker,
    list_checkpoint_folders,
    list_damaged_folders,
    parse_step,
    read_manifest,
    staging_folder,
)
from clustertrain.checkpoint.format.storage import Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError, with_retries
from clustertrain.errors import CheckpointError

EMERGENCY_REASON: SaveReason = "stop"
BEST_REASON: SaveReason = "best"


@dataclass(frozen=True)
class RetentionPolicy:
    """The settings of the ``[checkpoint]`` table; see :class:`clustertrain.config.checkpoint.CheckpointSpec`."""

    keep: int = 3
    keep_every: int = 0
    """Steps between milestones; 0: no milestones."""
    keep_best: int = 0
    best: str = ""
    """Name of the deciding metric."""
    best_mode: Literal["min", "max"] = "min"


@dataclass(frozen=True)
class CheckpointInfo:
    """The properties of a committed checkpoint that the policy uses."""

    step: int
    reason: SaveReason = "interval"
    metric: float | None = None
    """Value of the deciding metric. None or NaN: no value."""


def select_for_deletion(
    checkpoints: Collection[CheckpointInfo], policy: RetentionPolicy, newest_valid: int | None
) -> list[int]:
    """Return the steps to delete, oldest first. ``newest_valid`` is the step of the newest valid checkpoint."""
    newest_first = sorted(checkpoints, key=lambda c: c.step, reverse=True)
    # A milestone is kept anyway, so its reason does not matter and need not be read.
    regular = [
        c for c in newest_first if c.reason not in (EMERGENCY_REASON, BEST_REASON) or _is_milestone(c.step, policy)
    ]
    best_only = [c for c in newest_first if c.reason == BEST_REASON][: max(0, policy.keep - len(regular))]
    newest_regular = regular[0].step if regular else -1
    emergency = [c for c in newest_first if c.reason == EMERGENCY_REASON and c.step > newest_regular]
    retained = (*regular[: policy.keep], *best_only, *emergency[: policy.keep], *_select_best(newest_first, policy))
    retained_steps = {c.step for c in retained}
    return sorted(
        c.step
        for c in checkpoints
        if c.step not in retained_steps and c.step != newest_valid and not _is_milestone(c.step, policy)
    )


def _is_milestone(step: int, policy: RetentionPolicy) -> bool:
    return policy.keep_every > 0 and step % policy.keep_every == 0


def _select_best(newest_first: list[CheckpointInfo], policy: RetentionPolicy) -> list[CheckpointInfo]:
    scored = [(c.metric, c) for c in newest_first if c.metric is not None and not math.isnan(c.metric)]
    # Sorting is stable, with reverse too: among equal values the newer one comes first.
    scored.sort(key=lambda pair: pair[0], reverse=policy.best_mode == "max")
    return [c for _, c in scored[: policy.keep_best]]


def read_checkpoint_info(folder: Folder, policy: RetentionPolicy) -> CheckpointInfo:
    """Return the properties of a committed checkpoint; a damaged one counts as regular and has no metric.

    Raises:
        StorageError: the file system failed.
    """
    step = parse_step(folder) or 0
    if _is_milestone(step, policy) and not policy.keep_best:
        return CheckpointInfo(step)  # kept in any case, and a long run may have many
    marker = folder / COMMITTED
    try:
        marker_stat = with_retries(marker.stat, marker)
        reason, metric = _read_reason_and_metric(folder, marker_stat.st_ino, marker_stat.st_mtime_ns)
    except StorageError:
        raise
    except (OSError, CheckpointError):
        return CheckpointInfo(step)
    return CheckpointInfo(step, reason, metric.value if metric is not None and metric.name == policy.best else None)


# The manifest of a large model has megabytes, and each save needs it. A new save of a step has a new marker.
@functools.lru_cache(maxsize=4096)
def _read_reason_and_metric(folder: Folder, inode: int, mtime_ns: int) -> tuple[SaveReason, CheckpointMetric | None]:
    manifest = read_manifest(folder)
    return manifest.reason, manifest.metric


def list_expired(
    root: Path,
    policy: RetentionPolicy,
    *,
    is_valid: Callable[[Path], bool],
    read_info: Callable[[Path, RetentionPolicy], CheckpointInfo] = read_checkpoint_info,
    candidates: Sequence[Path] | None = None,
) -> list[Path]:
    """Return the folders in ``root`` to delete, in order. Changes nothing.

    Checkpoints set aside as damaged are included once there is a valid one of their step or a newer step.

    Args:
        is_valid: returns whether a committed checkpoint can be restored; called from the newest on, until one is valid.
        read_info: may omit the reason and the metric if they should not count.
        candidates: the checkpoints to choose from, oldest first; None: all in ``root``.

    Raises:
        StorageError: the file system failed. Then nothing may be deleted.
    """
    committed = [
        p for p in (list_checkpoint_folders(root) if candidates is None else candidates) if has_commit_marker(p)
    ]
    newest_valid = next((parse_step(p) for p in reversed(committed) if is_valid(p)), None)
    steps = set(select_for_deletion([read_info(p, policy) for p in committed], policy, newest_valid))
    expired = [p for p in committed if parse_step(p) in steps]
    if newest_valid is not None:
        expired += [p for p in list_damaged_folders(root) if (parse_step(p) or 0) <= newest_valid]
    return expired


def delete_expired(
    root: Path,
    policy: RetentionPolicy,
    *,
    is_valid: Callable[[Path], bool],
    read_info: Callable[[Path, RetentionPolicy], CheckpointInfo] = read_checkpoint_info,
    protected: Collection[int] = (),
    fence: Fence | None = None,
) -> list[Path]:
    """Delete the folders from :func:`list_expired`, except the steps ``protected``, and return the deleted ones.

    Raises:
        OSError: a folder could not be deleted; those after it still exist.
        StorageError: see :func:`list_expired`; nothing was deleted.
        AttemptSuperseded: a newer attempt owns the run; the rest was not deleted.
    """
    expired = [
        p for p in list_expired(root, policy, is_valid=is_valid, read_info=read_info) if parse_step(p) not in protected
    ]
    markers = [read_marker(folder) for folder in expired]
    for folder, marker in zip(expired, markers, strict=True):
        check_fence(fence)
        delete_checkpoint(folder, marker)
    return expired


def has_expected_sizes(folder: Path) -> bool:
    """Return whether marker, manifest and file sizes match. It reads no data, so it misses a flipped byte."""
    try:
        check_sizes(folder, read_manifest(folder))
    except StorageError:
        raise  # it may be intact
    except CheckpointError:
        return False
    return True


def read_marker(folder: Folder) -> str | None:
    """Return the commit marker, which identifies a checkpoint among others of its step; None if there is none."""
    path = folder / COMMITTED
    try:
        read = path.read_bytes if isinstance(path, RemoteFolder) else lambda: reading.read_bytes(path)
        return with_retries(read, path).decode(errors="replace")
    except FileNotFoundError:
        return None


def delete_checkpoint(folder: Path, marker: str | None) -> None:
    """Delete the checkpoint in ``folder`` if it has this ``marker``.

    It is renamed first, so that a half-deleted checkpoint never counts. After a kill it has the name of an unfinished
    save, which the next restore removes.
    """
    step = parse_step(folder)
    trash = staging_folder(folder.parent, step or 0, "removed")
    if trash.exists():
        shutil.rmtree(trash)
    folder.rename(trash)
    if read_marker(trash) != marker:  # a newer attempt has saved the same step while this process was suspended
        trash.rename(folder)
        return
    fsio.fsync_folder(folder.parent)
    shutil.rmtree(trash)
