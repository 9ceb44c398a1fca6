"""The torchsnapshot engine: each large segment in its own file, small ones together in slabs.

``finish`` adds ``.snapshot_metadata``, with which torchsnapshot's ``Snapshot(folder).read_object("0/" + name)`` reads
any tensor.

``Snapshot.take`` itself is not used: it uses the process group, splits tensors larger than 512 MiB, names files after
tensors, and on a full disk leaves threads that still write. Its components (staging, slabs, write scheduler, file
plugin) do none of this, and accept sizes as arguments.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clustertrain import extras, fsio
from clustertrain.checkpoint.format.manifest import ShardRecord, TensorRecord
from clustertrain.checkpoint.format.staged_segments import Segment, SegmentLocation
from clustertrain.checkpoint.save.engines import library

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*torch.jit.script")  # called by the import
    extras.require("torchsnapshot", "checkpoint.engine = 'torchsnapshot'", alternative="choose engine = 'raw'")
    from torchsnapshot.batcher import batch_write_requests
    from torchsnapshot.io_preparers.tensor import TensorIOPreparer
    from torchsnapshot.manifest import Shard, ShardedTensorEntry, SnapshotMetadata, TensorEntry
    from torchsnapshot.scheduler import execute_write_reqs
    from torchsnapshot.serialization import ALL_SUPPORTED_DTYPES, SUPPORTED_QUANTIZED_DTYPES, Serializer
    from torchsnapshot.snapshot import SNAPSHOT_METADATA_FNAME
    from torchsnapshot.storage_plugins.fs import FSStoragePlugin
    from torchsnapshot.version import __version__

# A slab is a copy of its segments.
SLAB_BYTES = 16 << 20
# Limit of the bytes in flight: slabs and segments that are written without a copy.
MEMORY_BUDGET_BYTES = 256 << 20

_DTYPES = frozenset(map(str, ALL_SUPPORTED_DTYPES)) - frozenset(map(str, SUPPORTED_QUANTIZED_DTYPES))
_INTEGER_BY_ITEMSIZE = {1: "torch.uint8", 2: "torch.int16", 4: "torch.int32", 8: "torch.int64"}


class TorchsnapshotEngine:
    name = "torchsnapshot"
    patterns = ("rank-{rank}",)
    frozen_pattern = ""

    def write(self, folder: Path, rank: int, segments: Sequence[Segment], memory: memoryview) -> list[SegmentLocation]:
        root = folder / f"rank-{rank}"
        root.mkdir(mode=0o750)
        entries, requests = {}, []
        for n, segment in enumerate(segments):
            if segment.nbytes:
                # As bytes, which torchsnapshot writes unchanged. It pickles dtypes that it does not support.
                data = library.bytes_to_tensor(library.segment_bytes(segment, memory))
                entries[n], write_reqs = TensorIOPreparer.prepare_write(f"segment-{n}", data)
                requests += write_reqs
        _, requests = batch_write_requests(list(entries.values()), requests, SLAB_BYTES)
        asyncio.run(_execute_writes(root, requests))

        locations = [SegmentLocation(file=f"{root.name}/empty", offset=0)] * len(segments)
        for n, entry in entries.items():
            offset = entry.byte_range[0] if entry.byte_range else 0
            locations[n] = SegmentLocation(file=f"{root.name}/{entry.location}", offset=offset)
        if len(entries) < len(segments):
            (root / "empty").touch()
        library.fsync_and_verify(folder, segments, locations, memory)
        for path in sorted({folder, root, *((folder / p.file).parent for p in locations)}):
            fsio.fsync_folder(path)
        return locations

    def finish(self, folder: Path, tensors: Sequence[TensorRecord]) -> None:
        # Tensors without elements are omitted, because torchsnapshot cannot read them.
        manifest = {f"0/{tensor.name}": _make_entry(tensor) for tensor in tensors if tensor.shards}
        metadata = SnapshotMetadata(version=__version__, world_size=1, manifest=manifest)
        fsio.write_text(folder / SNAPSHOT_METADATA_FNAME, metadata.to_yaml())


async def _execute_writes(root: Path, requests: list[Any]) -> None:
    loop = asyncio.get_running_loop()
    # On a full disk many writes fail. The first failure is raised; the others need not be printed.
    loop.set_exception_handler(lambda loop, context: None)
    storage = FSStoragePlugin(root=str(root))
    try:
        pending_io = await execute_write_reqs(requests, storage, memory_budget_bytes=MEMORY_BUDGET_BYTES, rank=0)
        await pending_io.complete()
    finally:
        # If these tasks were cancelled midway, they would leave files open.
        tasks = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
        await asyncio.gather(*tasks, return_exceptions=True)


def _make_entry(tensor: TensorRecord) -> Any:
    """Return torchsnapshot's entry for a tensor: whole if one rank wrote it, otherwise sharded.

    A dtype that torchsnapshot lacks is replaced by integers of the same size; ``view(dtype)`` restores it.
    """
    dtype = f"torch.{tensor.dtype}"
    if dtype not in _DTYPES:
        dtype = _INTEGER_BY_ITEMSIZE[tensor.itemsize]
    shard_entries = [(s, _make_tensor_entry(s, dtype)) for s in tensor.shards]
    if [s.shape for s in tensor.shards] == [tensor.shape]:
        return shard_entries[0][1]
    return ShardedTensorEntry([Shard(list(s.start), list(s.shape), part) for s, part in shard_entries])


def _make_tensor_entry(shard: ShardRecord, dtype: str) -> Any:
    return TensorEntry(
        location=shard.file,
        serializer=Serializer.BUFFER_PROTOCOL.value,
        dtype=dtype,
        shape=list(shard.shape),
        replicated=False,
        byte_range=[shard.offset, shard.offset + shard.nbytes],
    )


def make() -> TorchsnapshotEngine:
    return TorchsnapshotEngine()
