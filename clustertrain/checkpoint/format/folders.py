"""The folders of checkpoints: made for a save, discarded, swept when a run comes back, set aside when damaged. What is
in them is :mod:`~clustertrain.checkpoint.format.manifest`'s.
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
from clustertrain.checkpoint.format import fence as fences
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.fence import Fence
from clustertrain.checkpoint.format.storage import RemoteFolder
from clustertrain.config.checks.storage_paths import is_url

log = logging.getLogger(__name__)


def staging_folder_for(root: Path, step: int, attempt: str, token: bytes) -> Path:
    """A folder that no other save has, not even one of the same step: a writer that has outlived its rank may still be
    at work in that."""
    return index.staging_folder(root, step, f"{attempt}-{token.hex()}")


def create_exclusive(folder: Path) -> None:
    if not folder.parent.exists():
        fsio.make_folder(folder.parent)
        fsio.fsync_folder(folder.parent.parent)
    if not fsio.claim_folder(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))


def discard(folder: Path) -> None:
    """Of a save that was not committed. A writer may be at work in it, and even commit it: under another name it is out
    of its reach as a whole, or not there any more."""
    swept = folder.with_name(f".swept{folder.name}")
    try:
        folder.rename(swept)
    except FileNotFoundError:
        return
    except OSError:  # ENOTEMPTY: swept before, and made again by a writer that came late
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(swept, ignore_errors=True)


def sweep(root: Path, fence: Fence | None = None) -> None:
    """Clear away what a killed save has left, and what an older attempt has under way, so that it can commit nothing
    any more.

    Raises:
        AttemptSuperseded: a newer attempt owns the run.
    """
    fences.check_fence(fence)
    fsio.make_folder(root)
    for old in root.glob(".old-step-*"):
        final = root / old.name.removeprefix(".old-")
        if final.exists():
            shutil.rmtree(old)
        else:  # killed between the two renames of writer.publish
            old.rename(final)
    for leftover in root.glob(".swept.step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for staging in root.glob(".step-*"):
        if fence is None or _parse_attempt(staging) <= fence.attempt:
            discard(staging)


def _parse_attempt(staging: Path) -> int:
    """The attempt that made it, 0 where that cannot be told."""
    match = re.fullmatch(r"\.step-\d{8,}-(\d+)-[0-9a-f]+", staging.name)
    return int(match[1]) if match else 0


def mark_damaged(skipped: list[dict[str, Any]]) -> None:
    """Rename what was passed over in a restore, so that it is not looked at again; ``path`` is in each entry."""
    for entry in skipped:
        if is_url(entry["path"]):
            _remove_marker(RemoteFolder(entry["path"]))
            continue
        folder = Path(entry["path"])
        damaged = index.damaged_folder(folder)
        if damaged.exists():
            shutil.rmtree(damaged)
        folder.rename(damaged)


def _remove_marker(folder: RemoteFolder) -> None:
    """Nothing can be renamed there. Without its marker it does not count, and is replaced by a copy that is whole."""
    try:
        (folder / index.COMMITTED).unlink()
    except OSError as e:
        log.warning("%s is damaged and stays: %s", folder, e)
