"""Which checkpoints stay and which go.

:func:`doomed` is the policy, over what is known of the checkpoints; :func:`choose` and :func:`apply` are the same for a
folder. A checkpoint stays where any of these holds:

* it is the newest one that is good (``good`` of :func:`choose` says what that means): where all newer ones are damaged
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
from clustertrain.checkpoint.format.storage_errors import StorageError, patiently
from clustertrain.errors import CheckpointError

EMERGENCY: index.Reason = "stop"
FOR_BEST: index.Reason = "best"


@dataclass(frozen=True)
class Policy:
    """What the ``[checkpoint]`` table asks for; see :class:`clustertrain.config.recipe.CheckpointSpec`."""

    keep: int = 3
    keep_every: int = 0  # steps; 0: none stays for ever
    keep_best: int = 0
    best: str = ""  # name of the deciding scalar
    best_mode: Literal["min", "max"] = "min"


@dataclass(frozen=True)
class Known:
    """What the policy looks at in one committed checkpoint. ``metric`` is the value of the deciding scalar; None and
    nan are no value."""

    step: int
    reason: index.Reason = "interval"
    metric: float | None = None


def doomed(checkpoints: Collection[Known], policy: Policy, newest_good: int | None) -> list[int]:
    """The steps that go, oldest first. ``newest_good`` is the step of the newest checkpoint that is good."""
    newest_first = sorted(checkpoints, key=lambda c: c.step, reverse=True)
    # One that stays for ever needs no other ground, so why it was made does not matter, and need not be read.
    regular = [c for c in newest_first if c.reason not in (EMERGENCY, FOR_BEST) or _is_milestone(c.step, policy)]
    for_best = [c for c in newest_first if c.reason == FOR_BEST][: max(0, policy.keep - len(regular))]
    overtaken = regular[0].step if regular else -1
    emergency = [c for c in newest_first if c.reason == EMERGENCY and c.step > overtaken]
    kept = (*regular[: policy.keep], *for_best, *emergency[: policy.keep], *_best(newest_first, policy))
    stays = {c.step for c in kept}
    return sorted(
        c.step
        for c in checkpoints
        if c.step not in stays and c.step != newest_good and not _is_milestone(c.step, policy)
    )


def _is_milestone(step: int, policy: Policy) -> bool:
    return policy.keep_every > 0 and step % policy.keep_every == 0


def _best(newest_first: list[Known], policy: Policy) -> list[Known]:
    valued = [(c.metric, c) for c in newest_first if c.metric is not None and not math.isnan(c.metric)]
    # Sorting is stable: of equal values the newer comes first, with reverse too.
    valued.sort(key=lambda pair: pair[0], reverse=policy.best_mode == "max")
    return [c for _, c in valued[: policy.keep_best]]


def known(folder: Folder, policy: Policy) -> Known:
    """What the index of a committed checkpoint says. One that does not read counts as regular and has no metric.

    Raises:
        StorageError: the file system would not read it, now at least.
    """
    step = index.step_of(folder) or 0
    if _is_milestone(step, policy) and not policy.keep_best:
        return Known(step)  # stays whatever its index says, and over a long run there may be many
    marker = folder / index.COMMITTED
    try:
        stamp = patiently(marker.stat, marker)
        reason, metric = _read(folder, stamp.st_ino, stamp.st_mtime_ns)
    except StorageError:
        raise
    except (OSError, CheckpointError):
        return Known(step)
    return Known(step, reason, metric.value if metric is not None and metric.name == policy.best else None)


# A large model's index has megabytes, and this is asked at every save. A save of the same step brings a new marker.
@functools.lru_cache(maxsize=4096)
def _read(folder: Folder, inode: int, mtime_ns: int) -> tuple[index.Reason, index.Metric | None]:
    manifest = index.read_manifest(folder)
    return manifest.reason, manifest.metric


def choose(
    root: Path,
    policy: Policy,
    *,
    good: Callable[[Path], bool],
    know: Callable[[Path, Policy], Known] = known,
    there: Sequence[Path] | None = None,
) -> list[Path]:
    """The folders in ``root`` that go, in the order in which to delete them. Changes nothing.

    What was set aside as damaged goes once a good checkpoint of its step or a newer one is there.

    Args:
        good: whether a committed checkpoint can be restored. Asked from the newest on, until one is.
        know: another one than :func:`known` may leave out the reason and the metric, where these shall not count.
        there: the checkpoints to choose among, oldest first; None: all in ``root``.

    Raises:
        StorageError: the file system would not read. Then nothing is known, and nothing must be deleted.
    """
    committed = [p for p in (index.folders(root) if there is None else there) if index.is_committed(p)]
    newest_good = next((index.step_of(p) for p in reversed(committed) if good(p)), None)
    steps = set(doomed([know(p, policy) for p in committed], policy, newest_good))
    going = [p for p in committed if index.step_of(p) in steps]
    if newest_good is not None:
        going += [p for p in index.set_aside(root) if (index.step_of(p) or 0) <= newest_good]
    return going


def apply(
    root: Path,
    policy: Policy,
    *,
    good: Callable[[Path], bool],
    know: Callable[[Path, Policy], Known] = known,
    spared: Collection[int] = (),
    fence: fences.Fence | None = None,
) -> list[Path]:
    """Delete what :func:`choose` says, but for the steps ``spared``; returns it.

    Raises:
        OSError: one could not be deleted; those after it are still there.
        StorageError: as :func:`choose`; nothing was deleted.
        TakenOver: a newer attempt owns the run, and all that was not deleted before.
    """
    going = [p for p in choose(root, policy, good=good, know=know) if index.step_of(p) not in spared]
    markers = [marker_of(folder) for folder in going]
    for folder, marker in zip(going, markers, strict=True):
        fences.check(fence)
        remove(folder, marker)
    return going


def looks_whole(folder: Path) -> bool:
    """Marker, index and file sizes fit. Reads no data, so a flipped byte is not seen."""
    try:
        index.check_sizes(folder, index.read_manifest(folder))
    except StorageError:
        raise  # it may well be whole: no ground to delete anything
    except CheckpointError:
        return False
    return True


def marker_of(folder: Folder) -> str | None:
    """What tells a checkpoint from another one of the same step; None without a marker."""
    path = folder / index.COMMITTED
    try:
        return str(patiently(path.read_bytes, path).decode(errors="replace"))
    except FileNotFoundError:
        return None


def remove(folder: Path, marker: str | None) -> None:
    """Delete the checkpoint that has this ``marker``. It loses its name first, so that half of one never looks like a
    whole one; what a kill leaves behind has the name of a save that did not end, and goes as such at the next restore.
    """
    step = index.step_of(folder)
    away = index.staging_folder(folder.parent, step or 0, "removed")
    if away.exists():
        shutil.rmtree(away)
    folder.rename(away)
    if marker_of(away) != marker:  # this process was held up, and a newer attempt has saved the same step meanwhile
        away.rename(folder)
        return
    fsio.fsync_folder(folder.parent)
    shutil.rmtree(away)
