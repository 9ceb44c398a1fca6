"""Node-local checkpoints: parts on the node's own disk.

A part is written there first, which frees its staging buffer before the shared file system has the part. A run that
returns to the node reads the part from there.

This tier is optional. Only a commit in the shared folder counts, and bytes read here must match the checksums in the
manifest there.

    LOCAL/<run>/step-00000500-<attempt>-…/   the files of this node's ranks, with their names in the shared folder
        .rank-<r>.done                       the record of rank r's part, written last

Each rank removes its own files. A restore removes those of other attempts.
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
from clustertrain.checkpoint.format.storage_errors import StorageError, warn_once
from clustertrain.checkpoint.save import commit, links
from clustertrain.checkpoint.save.commit import PartRecord
from clustertrain.checkpoint.save.engines import Engine, get_engine
from clustertrain.checkpoint.save.links import SavedPart
from clustertrain.checkpoint.save.writer_jobs import WriteJob
from clustertrain.errors import CheckpointError

log = logging.getLogger(__name__)

VERIFY_BYTES = 4 * checksums.BLOCK_BYTES  # verified at a time
_FOLDER_NAME = re.compile(r"step-(\d{8,})-.+")


def local_folder(root: Path, made_in: str) -> Path:
    """Return the local folder of the save whose shared staging folder is named ``made_in``."""
    return root / made_in.lstrip(".")


def _list_folders(root: Path) -> list[Path]:
    """Return the folders of saves in ``root``, oldest step first."""
    try:
        names = [p.name for p in root.iterdir()]
    except OSError:
        return []
    numbered = sorted((int(m[1]), n) for n in names if (m := _FOLDER_NAME.fullmatch(n)))
    return [root / n for _, n in numbered]


# -- writing


def write_local_part(job: WriteJob, memory: memoryview, in_use: Collection[str] = ()) -> bool:
    """Write a part to ``job.local_folder``. Return False, and leave nothing there, if there is no space or no disk.

    Args:
        in_use: folders whose parts are not in the shared folder yet.
    """
    folder, writer_engine = Path(job.local_folder), get_engine(job.engine)
    try:
        _make_private_folder(folder.parent)
        try:
            _make_room(folder, writer_engine, job.rank, in_use, keep_newest=1)
            _write_part(folder, job, memory)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _make_room(folder, writer_engine, job.rank, in_use, keep_newest=0)
            _write_part(folder, job, memory)
    except OSError as e:
        warn_once(
            log, f"{folder.parent}: cannot be used: {e.strerror or e}; checkpoints go straight to the shared folder"
        )
        _remove_part(folder, writer_engine, job.rank)
        return False
    fault_points.fault_point("after_local_write", job.rank)
    return True


def _make_private_folder(root: Path) -> None:
    """Create ``root``. Refuse a folder of another user, who may have created it in a folder like /tmp."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder_stat = root.lstat()
    if not stat.S_ISDIR(folder_stat.st_mode) or folder_stat.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, "it is not a folder of this user")


def _make_room(folder: Path, writer_engine: Engine, rank: int, in_use: Collection[str], *, keep_newest: int) -> None:
    """Remove this rank's files of other saves, except the ``keep_newest`` newest saves and those ``in_use``."""
    other_folders = [p for p in _list_folders(folder.parent) if p != folder]
    for other_folder in other_folders[: len(other_folders) - keep_newest]:
        if str(other_folder) in in_use:
            continue
        _remove_part(other_folder, writer_engine, rank)
        with suppress(OSError):
            other_folder.rmdir()  # succeeds for the last rank


def _remove_part(folder: Path, writer_engine: Engine, rank: int) -> None:
    with suppress(OSError):
        commit.done_file(folder, rank).unlink(missing_ok=True)
        commit.remove_part_files(folder, writer_engine, rank)


def _write_part(folder: Path, job: WriteJob, memory: memoryview) -> None:
    _remove_part(folder, get_engine(job.engine), job.rank)
    folder.mkdir(exist_ok=True, mode=0o700)
    fs_stats = os.statvfs(folder)
    needed = sum(s.nbytes for s in job.segments)
    if fs_stats.f_bavail * fs_stats.f_frsize < needed:  # fail before writing anything
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    commit.mark_part_done(folder, job.rank, commit.write_part(folder, job, memory, None))


def copy_to_shared(job: WriteJob) -> int:
    """Copy the part in ``job.local_folder`` to the shared folder, with its done-file, and return its size.

    Raises:
        OSError: see :func:`clustertrain.checkpoint.save.commit.write_and_mark_done`.
        StorageError: the local disk has lost the part.
    """
    source, folder, writer_engine = Path(job.local_folder), Path(job.folder), get_engine(job.engine)
    if commit.is_part_complete(job):
        return sum(s.nbytes for s in job.segments)
    part = _read_part(source, job.rank)
    commit.remove_part_files(folder, writer_engine, job.rank)
    linked = _link_copied_files(folder, part, links.find_saved_part(folder.parent, job))
    _verify_part(source, job.rank, part, linked)
    for path in commit.list_part_files(source, writer_engine, job.rank):
        if path.name not in linked:
            _copy_durably(path, folder / path.relative_to(source), job.rank)
    fault_points.fault_point("after_write", job.rank)
    commit.mark_part_done(folder, job.rank, msgspec.structs.replace(part, linked=linked))
    fault_points.fault_point("after_part_done_marker", job.rank)
    return sum(s.nbytes for s in part.segments)


def _read_part(folder: Path, rank: int) -> PartRecord:
    """Return the record of a part on the local disk."""
    try:
        return schema.decode(commit.done_file(folder, rank).read_bytes(), PartRecord)
    except (OSError, msgspec.MsgspecError) as e:
        raise _unreadable_part(folder, rank, e) from e


def _verify_part(folder: Path, rank: int, part: PartRecord, skipped_files: Collection[str]) -> None:
    """Verify the bytes of a part, so that a bad disk cannot damage the checkpoint."""
    buffer = memoryview(bytearray(VERIFY_BYTES))
    try:
        for shard in _shard_records(part):
            for pos in range(0, shard.nbytes if shard.file not in skipped_files else 0, VERIFY_BYTES):
                read_into(buffer[: min(VERIFY_BYTES, shard.nbytes - pos)], folder, shard, pos)
    except (OSError, CheckpointError) as e:
        raise _unreadable_part(folder, rank, e) from e


def _unreadable_part(folder: Path, rank: int, e: Exception) -> StorageError:
    return StorageError(f"{folder}: the part of rank {rank} cannot be read: {e}")


def _shard_records(part: PartRecord) -> list[ShardRecord]:
    return list(map(commit.make_shard_record, part.segments, part.locations, part.block_hashes))


def _link_copied_files(folder: Path, part: PartRecord, saved: SavedPart | None) -> list[str]:
    """Link the files of a part that ``saved`` has with the same shards into ``folder``, and return their names."""
    if saved is None:
        return []
    shards_by_file: dict[str, list[ShardRecord]] = {}
    changed_files = set()
    for segment, shard in zip(part.segments, _shard_records(part), strict=True):
        if segment.nbytes:
            shards_by_file.setdefault(shard.file, []).append(shard)
            earlier = saved.shards.get((segment.name, segment.start))
            if earlier is None or not earlier.has_form_of(segment) or earlier.record != shard:
                changed_files.add(shard.file)
    return [
        name
        for name, shards in shards_by_file.items()
        if name not in changed_files and links.link_file(folder, saved, name, shards)
    ]


def _copy_durably(source: Path, target: Path, rank: int) -> None:
    """Copy a file or folder to ``target``, which must not exist; it is durable on return."""
    if source.is_dir():
        target.mkdir(mode=0o750)
        for inner in sorted(source.iterdir()):
            _copy_durably(inner, target / inner.name, rank)
        fsio.fsync_folder(target)
        return
    fault_points.fault_point("during_copy_to_shared", rank)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    try:
        with source.open("rb") as file:
            pos, size = 0, os.fstat(file.fileno()).st_size
            while pos < size and (nbytes := os.sendfile(fd, file.fileno(), pos, size - pos)):
                pos += nbytes
        os.fsync(fd)
    finally:
        os.close(fd)


# -- reading


class LocalTierReader:
    """Reader of this node's parts of the checkpoint that was written in ``made_in``. It counts ``bytes_read``."""

    def __init__(self, root: Path, made_in: str) -> None:
        self._folder = local_folder(root, made_in)
        self._missing_files: set[str] = set()
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read_into(self, buffer: memoryview, shard: ShardRecord, low: int, *, alone: bool = False) -> bool:
        """Read like :func:`~clustertrain.checkpoint.format.shard_io.read_into`. Return False if it is not here."""
        if shard.file in self._missing_files:
            return False
        try:
            read_into(buffer, self._folder, shard, low, alone=alone)
        except CheckpointError as e:
            self._missing_files.add(shard.file)
            if (self._folder / shard.file).exists():
                log.warning("%s; reading from the shared folder instead", e.message)
            return False
        with self._lock:
            self.bytes_read += len(buffer)
        return True


def remove_stale(root: Path, made_in: str, attempt: str) -> None:
    """Remove all folders except that of ``made_in`` and those that other ranks of ``attempt`` may have created.

    Called by one rank per node, after a restore.
    """
    for folder in _list_folders(root):
        attempt_match = re.fullmatch(rf"step-\d+-{re.escape(attempt)}-.*", folder.name)
        if folder != local_folder(root, made_in) and attempt_match is None:
            shutil.rmtree(folder, ignore_errors=True)


def remove_all(root: Path) -> None:
    """Remove all node-local checkpoints of a run. Called by one rank per node, after the run has completed."""
    shutil.rmtree(root, ignore_errors=True)
