"""Which checkpoints stay and which go.

:func:`select_for_deletion` is the policy, over what is known of the checkpoints; :func:`list_expired` and
:func:`delete_expired` are the same for a folder. A checkpoint stays where any of these holds:

* it is the newest one that is good (``good`` of :func:`list_expired` says what that means): where all newer ones are
damaged
  it is what the run goes back to;
* it is one of the ``keep`` newest regular ones. One that was made for its metric alone is none, or frequent evaluations
  would push out all that lies further back; it fills up while there are fewer;
* its step is a multiple of ``keep_every``: these stay for ever;
* it is one of the ``keep_best`` best;
* it is an emergency one (made because the run was told to stop) and no newer regular one is there. It never pushes out
  a regular one. Of a run that is stopped again and again before a regular one is due the ``keep`` newest stay, or its
  disk would fill.

Folders that were never committed are left alone, a save may be under way.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clustertrain import fsio
from clustertrain.checkpoint.format import fence as fences
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.storage import Folder
from clustertrain.checkpoint.format.storage_errors import StorageError, with_retries
from clustertrain.errors import CheckpointError

EMERGENCY_REASON: index.SaveReason = "stop"
BEST_REASON: index.SaveReason = "best"


@dataclass(frozen=True)
class RetentionPolicy:
    """What the ``[checkpoint]`` table asks for; see :class:`clustertrain.config.checkpoint.CheckpointSpec`."""

    keep: int = 3
    keep_every: int = 0  # steps; 0: none stays for ever
    keep_best: int = 0
    best: str = ""  # name of the deciding scalar
    best_mode: Literal["min", "max"] = "min"


@dataclass(frozen=True)
class CheckpointInfo:
    """What the policy looks at in one committed checkpoint. ``metric`` is the value of the deciding scalar; None and
    nan are no value."""

    step: int
    reason: index.SaveReason = "interval"
    metric: float | None = None


def select_for_deletion(
    checkpoints: Collection[CheckpointInfo], policy: RetentionPolicy, newest_valid: int | None
) -> list[int]:
    """The steps that go, oldest first. ``newest_valid`` is the step of the newest checkpoint that is good."""
    newest_first = sorted(checkpoints, key=lambda c: c.step, reverse=True)
    # One that stays for ever needs no other ground, so why it was made does not matter, and need not be read.
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
    # Sorting is stable: of equal values the newer comes first, with reverse too.
    scored.sort(key=lambda pair: pair[0], reverse=policy.best_mode == "max")
    return [c for _, c in scored[: policy.keep_best]]


def read_checkpoint_info(folder: Folder, policy: RetentionPolicy) -> CheckpointInfo:
    """What the index of a committed checkpoint says. One that does not read counts as regular and has no metric.

    Raises:
        StorageError: the file system would not read it, now at least.
    """
    step = index.parse_step(folder) or 0
    if _is_milestone(step, policy) and not policy.keep_best:
        return CheckpointInfo(step)  # stays whatever its index says, and over a long run there may be many
    marker = folder / index.COMMITTED
    try:
        marker_stat = with_retries(marker.stat, marker)
        reason, metric = _read_reason_and_metric(folder, marker_stat.st_ino, marker_stat.st_mtime_ns)
    except StorageError:
        raise
    except (OSError, CheckpointError):
        return CheckpointInfo(step)
    return CheckpointInfo(step, reason, metric.value if metric is not None and metric.name == policy.best else None)


# A large model's index has megabytes, and this is asked at every save. A save of the same step brings a new marker.
@functools.lru_cache(maxsize=4096)
def _read_reason_and_metric(
    folder: Folder, inode: int, mtime_ns: int
) -> tuple[index.SaveReason, index.CheckpointMetric | None]:
    manifest = index.read_manifest(folder)
    return manifest.reason, manifest.metric


def list_expired(
    root: Path,
    policy: RetentionPolicy,
    *,
    is_valid: Callable[[Path], bool],
    read_info: Callable[[Path, RetentionPolicy], CheckpointInfo] = read_checkpoint_info,
    candidates: Sequence[Path] | None = None,
) -> list[Path]:
    """The folders in ``root`` that go, in the order in which to delete them. Changes nothing.

    What was set aside as damaged goes once a good checkpoint of its step or a newer one is there.

    Args:
        good: whether a committed checkpoint can be restored. Asked from the newest on, until one is.
        know: another one than :func:`read_checkpoint_info` may leave out the reason and the metric, where these shall
            not count.
        there: the checkpoints to choose among, oldest first; None: all in ``root``.

    Raises:
        StorageError: the file system would not read. Then nothing is known, and nothing must be deleted.
    """
    committed = [
        p for p in (index.list_checkpoint_folders(root) if candidates is None else candidates) if index.is_committed(p)
    ]
    newest_valid = next((index.parse_step(p) for p in reversed(committed) if is_valid(p)), None)
    steps = set(select_for_deletion([read_info(p, policy) for p in committed], policy, newest_valid))
    expired = [p for p in committed if index.parse_step(p) in steps]
    if newest_valid is not None:
        expired += [p for p in index.list_damaged_folders(root) if (index.parse_step(p) or 0) <= newest_valid]
    return expired


def delete_expired(
    root: Path,
    policy: RetentionPolicy,
    *,
    is_valid: Callable[[Path], bool],
    read_info: Callable[[Path, RetentionPolicy], CheckpointInfo] = read_checkpoint_info,
    protected: Collection[int] = (),
    fence: fences.Fence | None = None,
) -> list[Path]:
    """Delete what :func:`list_expired` says, but for the steps ``protected``; returns it.

    Raises:
        OSError: one could not be deleted; those after it are still there.
        StorageError: as :func:`list_expired`; nothing was deleted.
        AttemptSuperseded: a newer attempt owns the run, and all that was not deleted before.
    """
    expired = [
        p
        for p in list_expired(root, policy, is_valid=is_valid, read_info=read_info)
        if index.parse_step(p) not in protected
    ]
    markers = [read_marker(folder) for folder in expired]
    for folder, marker in zip(expired, markers, strict=True):
        fences.check_fence(fence)
        delete_checkpoint(folder, marker)
    return expired


def has_expected_sizes(folder: Path) -> bool:
    """Marker, index and file sizes fit. Reads no data, so a flipped byte is not seen."""
    try:
        index.check_sizes(folder, index.read_manifest(folder))
    except StorageError:
        raise  # it may well be whole: no ground to delete anything
    except CheckpointError:
        return False
    return True


def read_marker(folder: Folder) -> str | None:
    """What tells a checkpoint from another one of the same step; None without a marker."""
    path = folder / index.COMMITTED
    try:
        return str(with_retries(path.read_bytes, path).decode(errors="replace"))
    except FileNotFoundError:
        return None


def delete_checkpoint(folder: Path, marker: str | None) -> None:
    """Delete the checkpoint that has this ``marker``. It loses its name first, so that half of one never looks like a
    whole one; what a kill leaves behind has the name of a save that did not end, and goes as such at the next restore.
    """
    step = index.parse_step(folder)
    trash = index.staging_folder(folder.parent, step or 0, "removed")
    if trash.exists():
        shutil.rmtree(trash)
    folder.rename(trash)
    if read_marker(trash) != marker:  # this process was held up, and a newer attempt has saved the same step meanwhile
        trash.rename(folder)
        return
    fsio.fsync_folder(folder.parent)
    shutil.rmtree(trash)
