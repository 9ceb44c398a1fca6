"""The tier on a node's own disk. A rank's part goes there first, so that the memory it was staged in is free before the
shared file system has it; and a run that comes back to the node reads it from there.

It helps and is never needed. A checkpoint counts when it is committed in the shared folder, and what is read here must
fit the checksums in the manifest there.

    LOCAL/<run>/step-00000500-<attempt>-…/   the files of this node's ranks, with their names in the shared folder
        .rank-<r>.done                       what rank r has written; last

Each rank removes its own files; what is left of other attempts goes at a restore.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from clustertrain import fsio, schema
from clustertrain.checkpoint.core import fault_points
from clustertrain.checkpoint.format import checksums
from clustertrain.checkpoint.format.manifest import ShardRecord
from clustertrain.checkpoint.format.shard_io import read_into
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.save import commit
from clustertrain.checkpoint.save.commit import Part, Write
from clustertrain.checkpoint.save.engines import Engine, engine
from clustertrain.errors import CheckpointError

log = logging.getLogger(__name__)

PIECE_BYTES = 4 * checksums.BLOCK_BYTES  # that are verified at a time
_NAME = re.compile(r"step-(\d{8,})-.+")


def folder_of(root: Path, made_in: str) -> Path:
    """Of the save that the shared folder ``made_in`` is for, before it is committed."""
    return root / made_in.lstrip(".")


def _folders(root: Path) -> list[Path]:
    """The oldest step first."""
    try:
        names = [p.name for p in root.iterdir()]
    except OSError:
        return []
    found = sorted((int(m[1]), n) for n in names if (m := _NAME.fullmatch(n)))
    return [root / n for _, n in found]


# -- writing


def keep(job: Write, memory: memoryview, busy: Collection[str] = ()) -> bool:
    """Put a part into ``job.local``. False: there is no room, or no such disk; nothing of it is left there then.

    Args:
        busy: folders with parts that have not been handed on yet.
    """
    folder, by = Path(job.local), engine(job.engine)
    try:
        _own_folder(folder.parent)
        try:
            _make_room(folder, by, job.rank, busy, spare=1)
            _write(folder, job, memory)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _make_room(folder, by, job.rank, busy, spare=0)
            _write(folder, job, memory)
    except OSError as e:
        _warn_once(f"{folder.parent}: cannot be used, checkpoints go straight to the shared folder: {e.strerror or e}")
        _remove_part(folder, by, job.rank)
        return False
    fault_points.reached("kept", job.rank)
    return True


def _own_folder(root: Path) -> None:
    """Make it; in a folder like /tmp somebody else may have made it."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, "it is no folder of this user's")


def _make_room(folder: Path, by: Engine, rank: int, busy: Collection[str], *, spare: int) -> None:
    """Remove this rank's files of other saves, but for the ``spare`` newest and the ``busy`` of them."""
    others = [p for p in _folders(folder.parent) if p != folder]
    for other in others[: len(others) - spare]:
        if str(other) in busy:
            continue
        _remove_part(other, by, rank)
        with suppress(OSError):
            other.rmdir()  # of the last rank


def _remove_part(folder: Path, by: Engine, rank: int) -> None:
    with suppress(OSError):
        commit.done_file(folder, rank).unlink(missing_ok=True)
        commit.clear(folder, by, rank)


def _write(folder: Path, job: Write, memory: memoryview) -> None:
    _remove_part(folder, engine(job.engine), job.rank)
    folder.mkdir(exist_ok=True, mode=0o700)
    room = os.statvfs(folder)
    needed = sum(s.nbytes for s in job.segments)
    if room.f_bavail * room.f_frsize < needed:  # told before so many bytes are written
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    commit.leave(folder, job.rank, commit.put(folder, job, memory))


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning("%s", message)


def hand_on(job: Write) -> int:
    """Copy what :func:`keep` has put into ``job.local`` to the shared folder, with its done-file; returns its bytes.

    Raises:
        OSError: as :func:`clustertrain.checkpoint.save.commit.write`.
        StorageError: the local disk has lost it.
    """
    near, folder, by = Path(job.local), Path(job.folder), engine(job.engine)
    if commit.handed_in(job):
        return sum(s.nbytes for s in job.segments)
    part = _verified(near, job.rank)
    commit.clear(folder, by, job.rank)
    for path in commit.files_of(near, by, job.rank):
        _copy(path, folder / path.relative_to(near), job.rank)
    fault_points.reached("written", job.rank)
    commit.leave(folder, job.rank, part)
    fault_points.reached("handed in", job.rank)
    return sum(s.nbytes for s in part.segments)


def _verified(near: Path, rank: int) -> Part:
    """What is there, as it was written: a disk that garbles it must not do so to the checkpoint."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    try:
        part = schema.decode(commit.done_file(near, rank).read_bytes(), Part)
        for shard in map(commit.shard, part.segments, part.places, part.blocks):
            for at in range(0, shard.nbytes, PIECE_BYTES):
                read_into(buffer[: min(PIECE_BYTES, shard.nbytes - at)], near, shard, at)
    except (OSError, msgspec.MsgspecError, CheckpointError) as e:
        raise StorageError(f"{near}: what rank {rank} has written there cannot be read: {e}") from e
    return part


def _copy(source: Path, target: Path, rank: int) -> None:
    """A file or a folder, which is not there yet; durable when it returns."""
    if source.is_dir():
        target.mkdir(mode=0o750)
        for inner in sorted(source.iterdir()):
            _copy(inner, target / inner.name, rank)
        fsio.fsync_folder(target)
        return
    fault_points.reached("while copying", rank)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    try:
        with source.open("rb") as file:
            at, size = 0, os.fstat(file.fileno()).st_size
            while at < size and (sent := os.sendfile(fd, file.fileno(), at, size - at)):
                at += sent
        os.fsync(fd)
    finally:
        os.close(fd)


# -- reading


class Near:
    """What this node may have of the checkpoint that was made in ``made_in``. ``bytes``: so many were read here."""

    def __init__(self, root: Path, made_in: str) -> None:
        self._folder = folder_of(root, made_in)
        self._not_here: set[str] = set()
        self._lock = threading.Lock()
        self.bytes = 0

    def read_into(self, into: memoryview, shard: ShardRecord, low: int, *, alone: bool = False) -> bool:
        """As :func:`clustertrain.checkpoint.format.shard_io.read_into`; False where it has to be read elsewhere."""
        if shard.file in self._not_here:
            return False
        try:
            read_into(into, self._folder, shard, low, alone=alone)
        except CheckpointError as e:
            self._not_here.add(shard.file)
            if (self._folder / shard.file).exists():
                log.warning("%s; read from the shared folder", e.message)
            return False
        with self._lock:
            self.bytes += len(into)
        return True


def tidy(root: Path, made_in: str, attempt: str) -> None:
    """Remove all but what belongs to the checkpoint that was made in ``made_in``, and what other ranks of ``attempt``
    may have begun. For one rank of a node, after a restore."""
    for folder in _folders(root):
        own = re.fullmatch(rf"step-\d+-{re.escape(attempt)}-.*", folder.name)
        if folder != folder_of(root, made_in) and own is None:
            shutil.rmtree(folder, ignore_errors=True)


def remove(root: Path) -> None:
    """All of a run. For one rank of a node, when there is nothing left to come back for."""
    shutil.rmtree(root, ignore_errors=True)
