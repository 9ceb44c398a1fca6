"""The folders of checkpoints: create, discard, sweep before a restore, set aside if damaged.

Their content is described in :mod:`~clustertrain.checkpoint.format.manifest`.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from clustertrain import fsio
from clustertrain.checkpoint.format.fence import Fence, check_fence
from clustertrain.checkpoint.format.manifest import COMMITTED, damaged_folder, staging_folder
from clustertrain.checkpoint.format.storage import RemoteFolder
from clustertrain.config.checks.storage_paths import is_url

log = logging.getLogger(__name__)


def staging_folder_for(root: Path, step: int, attempt: str, token: bytes) -> Path:
    """Return a folder that no other save uses, not even one of the same step by an orphaned writer."""
    return staging_folder(root, step, f"{attempt}-{token.hex()}")


def create_exclusive(folder: Path) -> None:
    """Create ``folder``, which must not exist, and its parent if needed."""
    if not folder.parent.exists():
        fsio.make_folder(folder.parent)
        fsio.fsync_folder(folder.parent.parent)
    if not fsio.claim_folder(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))


def discard(folder: Path) -> None:
    """Remove the folder of an uncommitted save.

    It is renamed first, so that a writer which is still writing to it, or even committing it, finds nothing under the
    old name.
    """
    swept = folder.with_name(f".swept{folder.name}")
    try:
        folder.rename(swept)
    except FileNotFoundError:
        return
    except OSError:  # ENOTEMPTY: swept before, and created again by a late writer
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(swept, ignore_errors=True)


def sweep(root: Path, fence: Fence | None = None) -> None:
    """Remove the remains of killed saves, and the pending saves of older attempts, which then cannot commit them.

    Raises:
        AttemptSuperseded: a newer attempt owns the run.
    """
    check_fence(fence)
    fsio.make_folder(root)
    for old in root.glob(".old-step-*"):
        final = root / old.name.removeprefix(".old-")
        if final.exists():
            shutil.rmtree(old)
        else:  # killed between the two renames of save.commit.publish
            old.rename(final)
    for leftover in root.glob(".swept.step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for staging in root.glob(".step-*"):
        if fence is None or _parse_attempt(staging) <= fence.attempt:
            discard(staging)


def _parse_attempt(staging: Path) -> int:
    """Return the attempt that created the folder, 0 if its name does not have it."""
    match = re.fullmatch(r"\.step-\d{8,}-(\d+)-[0-9a-f]+", staging.name)
    return int(match[1]) if match else 0


def mark_damaged(skipped: list[dict[str, Any]]) -> None:
    """Rename the checkpoints that a restore found damaged, so that no later restore tries them.

    Args:
        skipped: see :class:`~clustertrain.checkpoint.load.restore.RestoreResult`.
    """
    for entry in skipped:
        if is_url(entry["path"]):
            _remove_marker(RemoteFolder(entry["path"]))
            continue
        folder = Path(entry["path"])
        damaged = damaged_folder(folder)
        if damaged.exists():
            shutil.rmtree(damaged)
        folder.rename(damaged)


def _remove_marker(folder: RemoteFolder) -> None:
    """Remove the commit marker of a remote checkpoint, which cannot be renamed.

    The checkpoint no longer counts, and a later upload replaces it.
    """
    try:
        (folder / COMMITTED).unlink()
    except OSError as e:
        log.warning("%s is damaged and could not be invalidated: %s", folder, e)
