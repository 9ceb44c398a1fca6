"""Write one rank's blocks to its data file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from clustertrain.checkpoint import manifest as index
from clustertrain.checkpoint.manifest import ShardRecord, TensorRecord
from clustertrain.checkpoint.state import Block
from clustertrain.errors import CheckpointError


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in C order. Copies only what lies on a device or is not contiguous."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def write_blocks(folder: Path, rank: int, blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """Write and fsync ``rank-<r>.bin``; returns a record a block, with the checksum of what was handed to the kernel.

    Raises:
        OSError: the disk is full, the quota is spent, …
    """
    name = index.rank_file(rank)
    records = []
    fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    try:
        offset = 0
        for b in blocks:
            data = as_bytes(b.local) if b.local.numel() else memoryview(b"")
            _write_all(fd, data)
            records.append(
                {
                    "name": b.name,
                    "kind": b.kind,
                    "dtype": str(b.local.dtype).removeprefix("torch."),
                    "itemsize": b.local.element_size(),
                    "shape": b.shape,
                    "shard": {
                        "file": name,
                        "offset": offset,
                        "nbytes": len(data),
                        "start": b.start,
                        "shape": tuple(b.local.shape),
                        "checksum": index.checksum(data),
                    },
                }
            )
            offset += len(data)
        os.fsync(fd)
    finally:
        os.close(fd)
    return records


def merge(records: Iterable[dict[str, Any]]) -> tuple[TensorRecord, ...]:
    """The records of all ranks as one record a logical tensor.

    Raises:
        CheckpointError: the shards of a tensor do not add up to it (a rank holds other state than the rest).
    """
    heads: dict[str, dict[str, Any]] = {}
    shards: dict[str, list[ShardRecord]] = {}
    for record in records:
        shard = record["shard"]
        heads[record["name"]] = record
        found = shards.setdefault(record["name"], [])
        if shard["nbytes"]:
            found.append(ShardRecord(**{**shard, "start": tuple(shard["start"]), "shape": tuple(shard["shape"])}))
    merged = []
    for name, head in sorted(heads.items()):
        shape = tuple(head["shape"])
        whole = head["itemsize"]
        for n in shape:
            whole *= n
        held = sum(s.nbytes for s in shards[name])
        if held != whole:
            raise CheckpointError(f"{name}: the ranks hold {held} bytes of {whole}; is it the same on all of them?")
        merged.append(
            TensorRecord(
                name=name,
                kind=head["kind"],
                dtype=head["dtype"],
                itemsize=head["itemsize"],
                shape=shape,
                shards=tuple(sorted(shards[name], key=lambda s: s.start)),
            )
        )
    return tuple(merged)
