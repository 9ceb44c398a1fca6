"""Checkpoints without torch and without a process group: list, verify, digest, assemble, prune.

What a roll-back has invalidated is skipped: the attempt that deletes it may never come.
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
    is_committed,
    parse_step,
    read_manifest,
)
from clustertrain.checkpoint.format.shard_io import read_shard
from clustertrain.checkpoint.format.storage import F, Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError, with_retries
from clustertrain.checkpoint.load import rollback
from clustertrain.errors import CheckpointError, NotFound

# Told how many bytes are done, and of how many.
Progress = Callable[[int, int], None]
DIGEST_KINDS: tuple[TensorKind, ...] = ("model", "optimizer")  # what a digest is of


def no_progress(done: int, total: int) -> None:
    """The progress that nobody looks at."""


def list_checkpoints(root: Folder, *, verify: bool = False, step: int | None = None) -> list[dict[str, Any]]:
    """All checkpoints in ``root``, or the one of ``step``, oldest first, as ``checkpoint list --json`` prints them.

    ``verified`` is true when every byte was read (``verify``) and its checksum fits, and false when something is known
    to be damaged: ``damage`` tells what. Otherwise it is null: without ``verify`` only the index and the sizes of the
    files are looked at, of one that was never committed nothing, and where the file system would not read,
    ``unreadable`` tells its words. What the index cannot tell because it is damaged is null too.
    """
    folders = [p for p in rollback.list_valid_folders(root) if step in (None, parse_step(p))]
    rows = [(p, describe(p, verify=verify)) for p in folders]
    # A run deletes its old ones whenever it has saved.
    existing = [(p, r) for p, r in rows if p.is_dir()]
    best = _find_best([p for p, _ in existing]) if step is None else None
    for folder, row in existing:
        row["best"] = folder == best
    return [r for _, r in existing]


def find_best(root: F) -> F:
    """The committed checkpoint whose deciding metric is the best, the newest of equal ones.

    Raises:
        NotFound: none has one.
    """
    folder = _find_best(rollback.list_valid_folders(root))
    if folder is None:
        raise NotFound(
            f"{root}: no checkpoint tells a value of the metric that decides",
            fix="evaluate on the way (data.validation), or name a scalar that is logged in checkpoint.best",
        )
    return folder


def _find_best(folders: Sequence[F]) -> F | None:
    """By the metric of the newest one that has any: what decides may have been changed on the way."""
    scored: list[tuple[F, CheckpointMetric]] = []
    for folder in folders:
        try:
            metric = read_manifest(folder).metric if is_committed(folder) else None
        except CheckpointError:  # damaged, and told as such elsewhere
            continue
        if metric is not None and metric.value is not None and math.isfinite(metric.value):
            scored.append((folder, metric))
    if not scored:
        return None
    name, mode = scored[-1][1].name, scored[-1][1].mode
    sign = -1.0 if mode == "max" else 1.0
    comparable = [(sign * (m.value or 0.0), -i, f) for i, (f, m) in enumerate(scored) if m.name == name]
    return min(comparable, key=lambda entry: entry[:2])[2]


def _folder_bytes(folder: Folder) -> int:
    if isinstance(folder, RemoteFolder):
        return sum(with_retries(folder.sizes, folder).values())
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += (Path(parent) / name).lstat().st_size
            except FileNotFoundError:  # being deleted
                continue
    return size


def describe(folder: Folder, *, verify: bool = False) -> dict[str, Any]:
    """The row of one checkpoint in :func:`list_checkpoints`."""
    row: dict[str, Any] = {
        "step": parse_step(folder),
        "path": str(folder),
        "bytes": _folder_bytes(folder),
        "committed": is_committed(folder),
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
    """Read every byte of a checkpoint and compare the checksums.

    Raises:
        DamagedCheckpoint: not committed, or a file is missing, cut short or altered; the message names the file.
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
    """What :func:`verify` would raise, of every file that is damaged: one message a file, which names it.

    Raises:
        StorageError: a file cannot be read, now at least.
        CheckpointError: written by a newer format.
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
    """One hash of the model's and the optimizer's logical tensors: name, dtype, shape and bytes in C order.

    It does not depend on the layout or the number of ranks that saved them. Holds one tensor at a time.

    Raises:
        DamagedCheckpoint: as :func:`verify`.
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
    """Of the whole tensor, in bytes."""
    return math.prod(tensor.shape) * tensor.itemsize


def assemble_tensor(folder: Folder, tensor: TensorRecord) -> NDArray[np.uint8]:
    """The whole tensor as bytes; the last dimension is the element's. numpy has no bfloat16, and needs none here.

    Raises:
        DamagedCheckpoint, StorageError: as :func:`clustertrain.checkpoint.format.shard_io.read_shard`.
    """
    shard_bytes = sum(s.nbytes for s in tensor.shards)
    if shard_bytes != tensor_bytes(tensor):
        raise DamagedCheckpoint(
            f"{folder}: the shards of {tensor.name} hold {shard_bytes} bytes of {tensor_bytes(tensor)}"
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


def find_checkpoint(root: F, step: int | None = None) -> F:
    """The folder of ``step``, or of the newest committed checkpoint.

    Raises:
        NotFound: there is none.
    """
    committed = [p for p in rollback.list_valid_folders(root) if is_committed(p)]
    if step is not None:
        committed = [p for p in committed if parse_step(p) == step]
    if not committed:
        existing_steps = ", ".join(str(parse_step(p)) for p in rollback.list_valid_folders(root)) or "none"
        missing = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
        raise NotFound(f"{root}: {missing}; steps there: {existing_steps}")
    return committed[-1]


def is_verified(folder: Path) -> bool:
    """Every byte is as it was written."""
    try:
        verify(folder)
    except StorageError:
        raise
    except CheckpointError:
        return False
    return True


def list_prunable(root: Path, keep: int, *, is_valid: Callable[[Path], bool] = is_verified) -> list[Path]:
    """What :func:`prune` would delete, in its order."""
    # Asked for by hand it counts all alike, whatever they were made for.
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
    """Delete all but the newest ``keep`` committed checkpoints; returns what was deleted.

    The newest one that is ``is_valid`` always stays, however many newer ones there are: where all of those are damaged
    it is what the run will go back to. Folders that were never committed are left alone, a save may be under way.
    """
    expired = list_prunable(root, keep, is_valid=is_valid)
    for folder in expired:
        retention.delete_checkpoint(folder, retention.read_marker(folder))
    return expired
