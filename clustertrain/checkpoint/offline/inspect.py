"""Operations on checkpoints that need neither torch nor a process group: list, verify, digest, assemble, prune.

Checkpoints that a rollback has invalidated are skipped; the attempt that would delete them may never start.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from clustertrain.checkpoint.core import retention
from clustertrain.checkpoint.format.manifest import (
    CheckpointMetric,
    DamagedCheckpoint,
    Manifest,
    TensorKind,
    TensorRecord,
    check_sizes,
    find_wrong_sizes,
    has_commit_marker,
    parse_step,
    read_manifest,
)
from clustertrain.checkpoint.format.shard_io import read_shard
from clustertrain.checkpoint.format.storage import F, Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError, with_retries
from clustertrain.checkpoint.load import rollback
from clustertrain.errors import CheckpointError, NotFound

# Called with the number of bytes processed and the total.
Progress = Callable[[int, int], None]
DIGEST_KINDS: tuple[TensorKind, ...] = ("model", "optimizer")


def no_progress(done: int, total: int) -> None:
    """Ignore the progress."""


def list_checkpoints(root: Folder, *, verify: bool = False, step: int | None = None) -> list[dict[str, Any]]:
    """Return the checkpoints in ``root``, oldest first, as ``checkpoint list --json`` prints them.

    If the record of rollbacks cannot be read (:func:`clustertrain.checkpoint.load.rollback.find_record_error`), the
    checkpoints that it invalidates are returned too, while restoring, exporting and pruning refuse.

    Args:
        root: the folder of the checkpoints.
        verify: read every byte and compare the checksums. Otherwise only the index and the file sizes are checked.
        step: return only the checkpoint of this step.

    Returns:
        One row per checkpoint. ``verified`` is true if every byte was read and its checksum matches, and false if the
        checkpoint is known to be damaged; ``damage`` then says how. Otherwise it is null: ``verify`` was not requested,
        the checkpoint was never committed, or the file system returned the error in ``unreadable``. Values that a
        damaged index does not reveal are also null. ``new_bytes`` are those in files that no row before it has: older
        checkpoints may share them (hard links). It is null for a single checkpoint.
    """
    folders = [p for p in rollback.list_readable_folders(root) if step in (None, parse_step(p))]
    seen_files: set[tuple[int, int]] | None = set() if step is None else None
    rows = [(p, describe(p, verify=verify, seen_files=seen_files)) for p in folders]
    # An active run deletes old checkpoints after each save.
    existing = [(p, r) for p, r in rows if p.is_dir()]
    best = _find_best([p for p, _ in existing]) if step is None else None
    for folder, row in existing:
        row["best"] = folder == best
    return [r for _, r in existing]


def find_best(root: F) -> F:
    """Return the committed checkpoint with the best value of the deciding metric, the newest if several are equal.

    Raises:
        NotFound: no checkpoint has a value.
    """
    folder = _find_best(rollback.list_valid_folders(root))
    if folder is None:
        raise NotFound(
            f"{root}: no checkpoint records a value of the deciding metric",
            fix="evaluate during training (data.validation), or set checkpoint.best to a scalar that is logged",
        )
    return folder


def _find_best(folders: Sequence[F]) -> F | None:
    """Compare by the metric of the newest checkpoint that has one, because the recipe's choice may have changed."""
    scored: list[tuple[F, CheckpointMetric]] = []
    for folder in folders:
        try:
            metric = read_manifest(folder).metric if has_commit_marker(folder) else None
        except CheckpointError:  # damaged; the caller reports that separately
            continue
        if metric is not None and metric.value is not None and math.isfinite(metric.value):
            scored.append((folder, metric))
    if not scored:
        return None
    name, mode = scored[-1][1].name, scored[-1][1].mode
    sign = -1.0 if mode == "max" else 1.0
    comparable = [(sign * (m.value or 0.0), -i, f) for i, (f, m) in enumerate(scored) if m.name == name]
    return min(comparable, key=lambda entry: entry[:2])[2]


def _folder_bytes(folder: Folder, seen_files: set[tuple[int, int]]) -> tuple[int, int]:
    """Return the bytes in ``folder``, and how many of them are in no file of ``seen_files``, to which they are added.

    Args:
        seen_files: devices and inodes of files that other checkpoints have too.
    """
    if isinstance(folder, RemoteFolder):
        size = sum(with_retries(folder.sizes, folder).values())
        return size, size
    size = new = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                file_stat = (Path(parent) / name).lstat()
            except FileNotFoundError:  # being deleted
                continue
            size += file_stat.st_size
            new += 0 if (file_stat.st_dev, file_stat.st_ino) in seen_files else file_stat.st_size
            if file_stat.st_nlink > 1:
                seen_files.add((file_stat.st_dev, file_stat.st_ino))
    return size, new


def describe(folder: Folder, *, verify: bool = False, seen_files: set[tuple[int, int]] | None = None) -> dict[str, Any]:
    """Return the row of one checkpoint in :func:`list_checkpoints`.

    Args:
        seen_files: device and inode of each file of the older checkpoints; this function adds those of this
            checkpoint. None: ``new_bytes`` stays null.
    """
    size, new = _folder_bytes(folder, set() if seen_files is None else seen_files)
    row: dict[str, Any] = {
        "step": parse_step(folder),
        "path": str(folder),
        "bytes": size,
        "new_bytes": new if seen_files is not None else None,
        "committed": has_commit_marker(folder),
        "verified": None,
        "engine": None,
        "layout": None,
        "world_size": None,
        "metric": None,
        "best": False,
    }
    if not row["committed"]:
        return row
    try:
        manifest = read_manifest(folder)
        row.update(engine=manifest.engine, layout=manifest.layout, world_size=manifest.world_size)
        if manifest.metric is not None and manifest.metric.value is not None:
            row["metric"] = {"name": manifest.metric.name, "value": manifest.metric.value}
        check_sizes(folder, manifest)
        if verify:
            _verify_data(folder, manifest)
            row["verified"] = True
    except StorageError as e:
        row.update(verified=None, unreadable=e.message)
    except CheckpointError as e:
        row.update(verified=False, damage=e.message)
    return row


def verify(folder: Folder) -> Manifest:
    """Read every byte of a checkpoint, compare the checksums, and return the manifest.

    Raises:
        DamagedCheckpoint: it is not committed, or a file is missing, truncated or altered; the message names the file.
    """
    manifest = read_manifest(folder)
    _verify_data(folder, manifest)
    return manifest


def _verify_data(folder: Folder, manifest: Manifest) -> None:
    check_sizes(folder, manifest)
    for tensor in manifest.tensors:
        for shard in tensor.shards:
            read_shard(folder, shard)


def find_damage(folder: Folder, progress: Progress = no_progress) -> list[str]:
    """Return one message per damaged file, while :func:`verify` raises only the first one.

    Raises:
        StorageError: a file cannot be read at the moment.
        CheckpointError: the checkpoint has a newer format.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpoint as e:
        return [e.message]
    shards = [s for t in manifest.tensors for s in t.shards]
    total, done_bytes = sum(s.nbytes for s in shards), 0
    damage_by_file = find_wrong_sizes(folder, manifest)
    for shard in shards:
        try:
            if shard.file not in damage_by_file:
                read_shard(folder, shard)
        except DamagedCheckpoint as e:
            damage_by_file[shard.file] = e.message
        done_bytes += shard.nbytes
        progress(done_bytes, total)
    return list(damage_by_file.values())


def digest(folder: Folder, kinds: Collection[TensorKind] = DIGEST_KINDS, progress: Progress = no_progress) -> str:
    """Return one hash over name, dtype, shape and bytes (C order) of all logical tensors of the given kinds.

    It does not depend on the layout or the number of ranks that saved them. Memory holds one tensor at a time.

    Raises:
        DamagedCheckpoint: see :func:`verify`.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    state = xxhash.xxh3_128()
    tensors = sorted((t for t in manifest.tensors if t.kind in kinds), key=lambda t: t.name)
    total, done_bytes = sum(tensor_bytes(t) for t in tensors), 0
    for tensor in tensors:
        state.update(json.dumps([tensor.name, tensor.dtype, list(tensor.shape)]).encode())
        state.update(assemble_tensor(folder, tensor).reshape(-1).data)
        done_bytes += tensor_bytes(tensor)
        progress(done_bytes, total)
    return state.hexdigest()


def tensor_bytes(tensor: TensorRecord) -> int:
    """Return the size of the whole tensor in bytes."""
    return math.prod(tensor.shape) * tensor.itemsize


def assemble_tensor(folder: Folder, tensor: TensorRecord) -> NDArray[np.uint8]:
    """Return the whole tensor as bytes of shape (…, itemsize). NumPy has no bfloat16.

    Raises:
        DamagedCheckpoint, StorageError: see :func:`clustertrain.checkpoint.format.shard_io.read_shard`.
    """
    shard_bytes = sum(s.nbytes for s in tensor.shards)
    if shard_bytes != tensor_bytes(tensor):
        raise DamagedCheckpoint(
            f"{folder}: the shards of {tensor.name} hold {shard_bytes} of {tensor_bytes(tensor)} bytes"
        )
    if len(tensor.shards) == 1:
        return np.frombuffer(read_shard(folder, tensor.shards[0]), dtype=np.uint8).reshape(
            *tensor.shape, tensor.itemsize
        )
    data = np.empty((*tensor.shape, tensor.itemsize), dtype=np.uint8)
    for shard in tensor.shards:
        block = np.frombuffer(read_shard(folder, shard), dtype=np.uint8).reshape(*shard.shape, tensor.itemsize)
        data[tuple(slice(s, s + n) for s, n in zip(shard.start, shard.shape, strict=True))] = block
    return data


def find_checkpoint(root: F, step: int | None = None, *, needs_record: bool = True) -> F:
    """Return the folder of the committed checkpoint of ``step``, or of the newest one.

    Args:
        needs_record: refuse if the record of rollbacks cannot be read. Otherwise the checkpoint may be one that a
            rollback invalidated.

    Raises:
        NotFound: it does not exist.
        CheckpointError: the record of rollbacks cannot be read.
    """
    folders = rollback.list_valid_folders(root) if needs_record else rollback.list_readable_folders(root)
    committed = [p for p in folders if has_commit_marker(p)]
    if step is not None:
        committed = [p for p in committed if parse_step(p) == step]
    if not committed:
        existing_steps = ", ".join(str(parse_step(p)) for p in folders) or "none"
        missing = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
        raise NotFound(f"{root}: {missing}; existing steps: {existing_steps}")
    return committed[-1]


def is_verified(folder: Path) -> bool:
    """Return whether no byte has changed since it was written."""
    try:
        verify(folder)
    except StorageError:
        raise
    except CheckpointError:
        return False
    return True


def list_prunable(root: Path, keep: int, *, is_valid: Callable[[Path], bool] = is_verified) -> list[Path]:
    """Return the checkpoints that :func:`prune` would delete, in its order."""
    # A manual prune counts all checkpoints alike, whatever triggered them.
    policy = retention.RetentionPolicy(keep=keep)
    candidates = rollback.list_valid_folders(root)
    return retention.list_expired(
        root,
        policy,
        is_valid=is_valid,
        read_info=lambda p, _: retention.CheckpointInfo(parse_step(p) or 0),
        candidates=candidates,
    )


def prune(root: Path, keep: int, *, is_valid: Callable[[Path], bool] = is_verified) -> list[Path]:
    """Delete all but the newest ``keep`` committed checkpoints, and return the deleted folders.

    The newest checkpoint that ``is_valid`` accepts always stays: if all newer ones are damaged, the run resumes from
    it. Uncommitted folders stay too, because a save may be under way.
    """
    expired = list_prunable(root, keep, is_valid=is_valid)
    for folder in expired:
        retention.delete_checkpoint(folder, retention.read_marker(folder))
    return expired
