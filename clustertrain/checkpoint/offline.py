"""Checkpoints without torch and without a process group: list, verify, digest, prune."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from clustertrain.checkpoint import manifest as index
from clustertrain.checkpoint import retention
from clustertrain.checkpoint.blocks import read_shard
from clustertrain.checkpoint.manifest import Damaged, Manifest, TensorRecord
from clustertrain.checkpoint.storage import StorageError
from clustertrain.errors import CheckpointError, NotFound


def list_checkpoints(root: Path, *, verify: bool = False) -> list[dict[str, Any]]:
    """All checkpoints in ``root``, oldest first, as ``checkpoint list --json`` prints them.

    ``verified`` is true when every byte was read (``verify``) and its checksum fits, and false when something is known
    to be damaged: ``damage`` tells what. Otherwise it is null: without ``verify`` only the index and the sizes of the
    files are looked at, of one that was never committed nothing, and where the file system would not read,
    ``unreadable`` tells its words. What the index cannot tell because it is damaged is null too.
    """
    return [_describe(folder, verify) for folder in index.folders(root)]


def _describe(folder: Path, verify: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": index.step_of(folder),
        "path": str(folder),
        "bytes": sum(p.stat().st_size for p in folder.iterdir() if p.is_file()),
        "committed": index.is_committed(folder),
        "verified": None,
        "engine": None,
        "layout": None,
        "world_size": None,
    }
    if not row["committed"]:
        return row
    try:
        manifest = index.read_manifest(folder)
        row.update(engine=manifest.engine, layout=manifest.layout, world_size=manifest.world_size)
        index.check_sizes(folder, manifest)
        if verify:
            _verify_data(folder, manifest)
            row["verified"] = True
    except StorageError as e:
        row.update(verified=None, unreadable=e.message)
    except CheckpointError as e:
        row.update(verified=False, damage=e.message)
    return row


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and compare the checksums.

    Raises:
        Damaged: not committed, or a file is missing, cut short or altered; the message names the file.
    """
    manifest = index.read_manifest(folder)
    _verify_data(folder, manifest)
    return manifest


def _verify_data(folder: Path, manifest: Manifest) -> None:
    index.check_sizes(folder, manifest)
    for tensor in manifest.tensors:
        for shard in tensor.shards:
            read_shard(folder, shard)


def digest(folder: Path) -> str:
    """One hash of the model's and the optimizer's logical tensors: name, dtype, shape and bytes in C order.

    It does not depend on the layout or the number of ranks that saved them. Holds one tensor at a time.

    Raises:
        Damaged: as :func:`verify`.
    """
    manifest = index.read_manifest(folder)
    index.check_sizes(folder, manifest)
    state = xxhash.xxh3_128()
    for tensor in sorted(manifest.tensors, key=lambda t: t.name):
        if tensor.kind != "other":
            state.update(json.dumps([tensor.name, tensor.dtype, list(tensor.shape)]).encode())
            state.update(_assemble(folder, tensor).reshape(-1).data)
    return state.hexdigest()


def _assemble(folder: Path, tensor: TensorRecord) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The whole tensor as bytes; the last dimension is the element's. numpy has no bfloat16, and needs none here."""
    whole = np.empty((*tensor.shape, tensor.itemsize), dtype=np.uint8)
    covered = 0
    for shard in tensor.shards:
        block = np.frombuffer(read_shard(folder, shard), dtype=np.uint8).reshape(*shard.shape, tensor.itemsize)
        whole[tuple(slice(s, s + n) for s, n in zip(shard.start, shard.shape, strict=True))] = block
        covered += shard.nbytes
    if covered != whole.nbytes:
        raise Damaged(f"{folder}: the shards of {tensor.name} hold {covered} bytes of {whole.nbytes}")
    return whole


def find(root: Path, step: int | None = None) -> Path:
    """The folder of ``step``, or of the newest committed checkpoint.

    Raises:
        NotFound: there is none.
    """
    committed = [p for p in index.folders(root) if index.is_committed(p)]
    if step is not None:
        committed = [p for p in committed if index.step_of(p) == step]
    if not committed:
        known = ", ".join(str(index.step_of(p)) for p in index.folders(root)) or "none"
        wanted = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
        raise NotFound(f"{root}: {wanted}; steps there: {known}")
    return committed[-1]


def looks_whole(folder: Path) -> bool:
    """Marker, index and file sizes fit. Reads no data, so a flipped byte is not seen."""
    try:
        index.check_sizes(folder, index.read_manifest(folder))
    except StorageError:
        raise  # it may well be whole: no ground to delete anything
    except CheckpointError:
        return False
    return True


def verifies(folder: Path) -> bool:
    """Every byte is as it was written."""
    try:
        verify(folder)
    except StorageError:
        raise
    except CheckpointError:
        return False
    return True


def prune(root: Path, keep: int, *, good: Callable[[Path], bool] = verifies) -> list[Path]:
    """Delete all but the newest ``keep`` committed checkpoints; returns what was deleted.

    The newest one that is ``good`` always stays, however many newer ones there are: where all of those are damaged it
    is what the run will go back to. Folders that were never committed are left alone, a save may be under way.
    """
    policy = retention.Policy(keep=keep)
    # Asked for by hand it counts all alike, whatever they were made for.
    return retention.apply(root, policy, good=good, know=lambda p, _: retention.Known(index.step_of(p) or 0))
