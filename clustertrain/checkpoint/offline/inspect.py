"""Checkpoints without torch and without a process group: list, verify, digest, assemble, prune.

What a roll-back has condemned is passed over: the attempt that deletes it may never come.
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
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.manifest import Damaged, Kind, Manifest, Metric, TensorRecord
from clustertrain.checkpoint.format.shard_io import read_shard
from clustertrain.checkpoint.format.storage import F, Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import StorageError, patiently
from clustertrain.checkpoint.load import rollback
from clustertrain.errors import CheckpointError, NotFound

# Told how many bytes are done, and of how many.
Progress = Callable[[int, int], None]
KINDS: tuple[Kind, ...] = ("model", "optimizer")  # what a digest is of


def unwatched(done: int, total: int) -> None:
    """The progress that nobody looks at."""


def list_checkpoints(root: Folder, *, verify: bool = False, step: int | None = None) -> list[dict[str, Any]]:
    """All checkpoints in ``root``, or the one of ``step``, oldest first, as ``checkpoint list --json`` prints them.

    ``verified`` is true when every byte was read (``verify``) and its checksum fits, and false when something is known
    to be damaged: ``damage`` tells what. Otherwise it is null: without ``verify`` only the index and the sizes of the
    files are looked at, of one that was never committed nothing, and where the file system would not read,
    ``unreadable`` tells its words. What the index cannot tell because it is damaged is null too.
    """
    folders = [p for p in rollback.counting(root) if step in (None, index.step_of(p))]
    rows = [(p, describe(p, verify=verify)) for p in folders]
    # A run deletes its old ones whenever it has saved.
    there = [(p, r) for p, r in rows if p.is_dir()]
    best = _best([p for p, _ in there]) if step is None else None
    for folder, row in there:
        row["best"] = folder == best
    return [r for _, r in there]


def best(root: F) -> F:
    """The committed checkpoint whose deciding metric is the best, the newest of equal ones.

    Raises:
        NotFound: none has one.
    """
    found = _best(rollback.counting(root))
    if found is None:
        raise NotFound(
            f"{root}: no checkpoint tells a value of the metric that decides",
            fix="evaluate on the way (data.validation), or name a scalar that is logged in checkpoint.best",
        )
    return found


def _best(folders: Sequence[F]) -> F | None:
    """By the metric of the newest one that has any: what decides may have been changed on the way."""
    valued: list[tuple[F, Metric]] = []
    for folder in folders:
        try:
            metric = index.read_manifest(folder).metric if index.is_committed(folder) else None
        except CheckpointError:  # damaged, and told as such elsewhere
            continue
        if metric is not None and metric.value is not None and math.isfinite(metric.value):
            valued.append((folder, metric))
    if not valued:
        return None
    name, mode = valued[-1][1].name, valued[-1][1].mode
    sign = -1.0 if mode == "max" else 1.0
    alike = [(sign * (m.value or 0.0), -i, f) for i, (f, m) in enumerate(valued) if m.name == name]
    return min(alike, key=lambda found: found[:2])[2]


def _bytes_in(folder: Folder) -> int:
    if isinstance(folder, RemoteFolder):
        return sum(patiently(folder.sizes, folder).values())
    size = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            try:
                size += (Path(inside) / name).lstat().st_size
            except FileNotFoundError:  # being deleted
                continue
    return size


def describe(folder: Folder, *, verify: bool = False) -> dict[str, Any]:
    """The row of one checkpoint in :func:`list_checkpoints`."""
    row: dict[str, Any] = {
        "step": index.step_of(folder),
        "path": str(folder),
        "bytes": _bytes_in(folder),
        "committed": index.is_committed(folder),
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
        manifest = index.read_manifest(folder)
        row.update(engine=manifest.engine, layout=manifest.layout, world_size=manifest.world_size)
        if manifest.metric is not None and manifest.metric.value is not None:
            row["metric"] = {"name": manifest.metric.name, "value": manifest.metric.value}
        index.check_sizes(folder, manifest)
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
        Damaged: not committed, or a file is missing, cut short or altered; the message names the file.
    """
    manifest = index.read_manifest(folder)
    _verify_data(folder, manifest)
    return manifest


def _verify_data(folder: Folder, manifest: Manifest) -> None:
    index.check_sizes(folder, manifest)
    for tensor in manifest.tensors:
        for shard in tensor.shards:
            read_shard(folder, shard)


def damages(folder: Folder, progress: Progress = unwatched) -> list[str]:
    """What :func:`verify` would raise, of every file that is damaged: one message a file, which names it.

    Raises:
        StorageError: a file cannot be read, now at least.
        CheckpointError: written by a newer format.
    """
    try:
        manifest = index.read_manifest(folder)
    except Damaged as e:
        return [e.message]
    shards = [s for t in manifest.tensors for s in t.shards]
    total, done = sum(s.nbytes for s in shards), 0
    found = index.wrong_sizes(folder, manifest)
    for shard in shards:
        try:
            if shard.file not in found:
                read_shard(folder, shard)
        except Damaged as e:
            found[shard.file] = e.message
        done += shard.nbytes
        progress(done, total)
    return list(found.values())


def digest(folder: Folder, kinds: Collection[Kind] = KINDS, progress: Progress = unwatched) -> str:
    """One hash of the model's and the optimizer's logical tensors: name, dtype, shape and bytes in C order.

    It does not depend on the layout or the number of ranks that saved them. Holds one tensor at a time.

    Raises:
        Damaged: as :func:`verify`.
    """
    manifest = index.read_manifest(folder)
    index.check_sizes(folder, manifest)
    state = xxhash.xxh3_128()
    tensors = sorted((t for t in manifest.tensors if t.kind in kinds), key=lambda t: t.name)
    total, done = sum(size_of(t) for t in tensors), 0
    for tensor in tensors:
        state.update(json.dumps([tensor.name, tensor.dtype, list(tensor.shape)]).encode())
        state.update(assemble(folder, tensor).reshape(-1).data)
        done += size_of(tensor)
        progress(done, total)
    return state.hexdigest()


def size_of(tensor: TensorRecord) -> int:
    """Of the whole tensor, in bytes."""
    return math.prod(tensor.shape) * tensor.itemsize


def assemble(folder: Folder, tensor: TensorRecord) -> NDArray[np.uint8]:
    """The whole tensor as bytes; the last dimension is the element's. numpy has no bfloat16, and needs none here.

    Raises:
        Damaged, StorageError: as :func:`clustertrain.checkpoint.format.shard_io.read_shard`.
    """
    covered = sum(s.nbytes for s in tensor.shards)
    if covered != size_of(tensor):
        raise Damaged(f"{folder}: the shards of {tensor.name} hold {covered} bytes of {size_of(tensor)}")
    if len(tensor.shards) == 1:
        return np.frombuffer(read_shard(folder, tensor.shards[0]), dtype=np.uint8).reshape(
            *tensor.shape, tensor.itemsize
        )
    whole = np.empty((*tensor.shape, tensor.itemsize), dtype=np.uint8)
    for shard in tensor.shards:
        block = np.frombuffer(read_shard(folder, shard), dtype=np.uint8).reshape(*shard.shape, tensor.itemsize)
        whole[tuple(slice(s, s + n) for s, n in zip(shard.start, shard.shape, strict=True))] = block
    return whole


def find(root: F, step: int | None = None) -> F:
    """The folder of ``step``, or of the newest committed checkpoint.

    Raises:
        NotFound: there is none.
    """
    committed = [p for p in rollback.counting(root) if index.is_committed(p)]
    if step is not None:
        committed = [p for p in committed if index.step_of(p) == step]
    if not committed:
        known = ", ".join(str(index.step_of(p)) for p in rollback.counting(root)) or "none"
        wanted = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
        raise NotFound(f"{root}: {wanted}; steps there: {known}")
    return committed[-1]


def verifies(folder: Path) -> bool:
    """Every byte is as it was written."""
    try:
        verify(folder)
    except StorageError:
        raise
    except CheckpointError:
        return False
    return True


def prunable(root: Path, keep: int, *, good: Callable[[Path], bool] = verifies) -> list[Path]:
    """What :func:`prune` would delete, in its order."""
    # Asked for by hand it counts all alike, whatever they were made for.
    policy = retention.Policy(keep=keep)
    there = rollback.counting(root)
    return retention.choose(
        root, policy, good=good, know=lambda p, _: retention.Known(index.step_of(p) or 0), there=there
    )


def prune(root: Path, keep: int, *, good: Callable[[Path], bool] = verifies) -> list[Path]:
    """Delete all but the newest ``keep`` committed checkpoints; returns what was deleted.

    The newest one that is ``good`` always stays, however many newer ones there are: where all of those are damaged it
    is what the run will go back to. Folders that were never committed are left alone, a save may be under way.
    """
    doomed = prunable(root, keep, good=good)
    for folder in doomed:
        retention.remove(folder, retention.marker_of(folder))
    return doomed
