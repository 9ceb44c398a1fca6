"""Shared reads: bytes that several ranks of a node need are read and verified once per node.

Replicas need the same bytes; ranks that shard a different dimension than the saved shards need parts of each row. The
ranks of a node read these bytes in steps. In each step every rank reads one load, a list of chunks, into memory that
the others can map. Then all ranks copy the bytes they need from all loads of the step, while they read the loads of the
next step.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd, prod
from pathlib import Path

import xxhash

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format.checksums import BLOCK_BYTES
from clustertrain.checkpoint.format.manifest import Manifest, ShardRecord, TensorRecord
from clustertrain.checkpoint.format.storage_errors import StorageError

CHUNK_BYTES = 4 * BLOCK_BYTES
LOAD_BYTES = 2 * CHUNK_BYTES  # each rank has two loads in memory
MIN_SHARED_BYTES = 1 << 20  # each rank reads smaller shards on its own
_NODE_BYTES = 16
_PROOF_BYTES = 16
_HANDLE_BYTES = _NODE_BYTES + 8 + 4 + _PROOF_BYTES
_ALIGN = 64

Consumer = Callable[[memoryview], None]


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a shard."""

    number: int
    """Identifies the chunk on all ranks."""
    shard: ShardRecord
    low: int
    """First byte in the shard."""
    nbytes: int


class ChunkTable:
    """The chunks of a checkpoint's tensors.

    A chunk has whole rows, so that a part of a row is in one chunk. Chunks end at checksum blocks if possible, so
    that no block is read twice. ``sizes`` has the bytes by chunk number, in the order of the files.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._first: dict[tuple[str, int], int] = {}
        self._all: list[Chunk] = []
        for tensor in manifest.tensors:
            for n, shard in enumerate(tensor.shards):
                if is_shareable(tensor, shard):
                    self._first[tensor.name, n] = len(self._all)
                    self._all += _split_shard(tensor, shard, len(self._all))
        in_order = sorted(self._all, key=lambda c: (c.shard.file, c.shard.offset + c.low))
        self.sizes = {c.number: c.nbytes for c in in_order}

    @property
    def count(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Chunk:
        return self._all[number]

    def iter_chunks(self, tensor: TensorRecord, n: int, start: int, stop: int) -> Iterator[tuple[Chunk, int, int]]:
        """Yield the chunks with the rows ``start`` to ``stop`` of shard ``n``, each with its range of these rows."""
        rows = rows_per_chunk(tensor, tensor.shards[n])
        for k in range(start // rows, -(-stop // rows)):
            yield self._all[self._first[tensor.name, n] + k], max(start, k * rows), min(stop, (k + 1) * rows)


def _split_shard(tensor: TensorRecord, shard: ShardRecord, first: int) -> list[Chunk]:
    step = rows_per_chunk(tensor, shard) * row_bytes(tensor, shard)
    return [
        Chunk(first + k, shard, low, min(step, shard.nbytes - low))
        for k, low in enumerate(range(0, shard.nbytes, step))
    ]


def row_bytes(tensor: TensorRecord, shard: ShardRecord) -> int:
    return tensor.itemsize * prod(shard.shape[1:])


def is_shareable(tensor: TensorRecord, shard: ShardRecord) -> bool:
    """Return whether a shard can be split into chunks and is large enough to be worth it."""
    return bool(shard.shape) and shard.nbytes >= MIN_SHARED_BYTES and row_bytes(tensor, shard) <= CHUNK_BYTES


def rows_per_chunk(tensor: TensorRecord, shard: ShardRecord) -> int:
    """Return the number of rows in a chunk."""
    size = row_bytes(tensor, shard)
    rows_per_block = BLOCK_BYTES // gcd(BLOCK_BYTES, size)  # this many rows end at the end of a block
    max_rows = CHUNK_BYTES // size
    return max_rows // rows_per_block * rows_per_block or max_rows


@dataclass
class ChunkRequest:
    """This rank's need for a chunk, and the functions that copy from it."""

    chunk: Chunk
    consumers: list[Consumer] = field(default_factory=list)


class SharedReadUnavailable(Exception):
    """The ranks of a node cannot map each other's memory."""


@dataclass(frozen=True)
class LoadSchedule:
    """The assignment of chunks to the ranks of a node and to steps."""

    steps: list[dict[int, list[int]]]
    """For each step, the numbers of the chunks that a rank reads, by rank."""
    shared: frozenset[int]
    """Numbers of all chunks in the schedule."""

    def loads_at(self, step: int) -> dict[int, list[int]]:
        return self.steps[step] if step < len(self.steps) else {}


def schedule_loads(chunks_by_rank: Mapping[int, frozenset[int]], sizes: Mapping[int, int]) -> LoadSchedule:
    """Distribute the chunks that several ranks of a node need over its ranks.

    Args:
        chunks_by_rank: the chunks that each rank of the node needs.
        sizes: the bytes of all chunks, in the order of reading.
    """
    use_counts = Counter(c for chunks in chunks_by_rank.values() for c in chunks)
    shared = [c for c in sizes if use_counts[c] > 1]
    loads: list[list[int]] = []
    free_bytes = 0
    for c in shared:
        if _aligned_size(sizes[c]) > free_bytes:
            loads.append([])
            free_bytes = LOAD_BYTES
        loads[-1].append(c)
        free_bytes -= _aligned_size(sizes[c])
    n = len(chunks_by_rank)
    steps = [dict(zip(chunks_by_rank, loads[at : at + n], strict=False)) for at in range(0, len(loads), n)]
    return LoadSchedule(steps, frozenset(shared))


def read_shared(
    ranks: Ranks,
    checkpoint_id: str,
    chunks: ChunkTable,
    requests: Mapping[int, ChunkRequest],
    fetch: Callable[[Chunk, memoryview], None],
    pool: Executor,
) -> set[int] | None:
    """Serve the requests for chunks that other ranks of this node need too, and return the numbers of the rest.

    Collective. If a read fails, its rank raises the error of ``fetch`` and the others return None, all at the same
    step. The ranks must then exchange the reason.

    Args:
        checkpoint_id: identifies the checkpoint, also among others of the same step.
        requests: this rank's requests, by the chunk's number.
        fetch: reads a chunk into memory and verifies it.

    Raises:
        SharedReadUnavailable: on all ranks, if some cannot map the memory of the others.
        StorageError: on all ranks, if they see different checkpoints.
    """
    bitmap = bytearray(-(-chunks.count // 8))
    for number in requests:
        bitmap[number // 8] |= 1 << number % 8
    with _create_shared_memory() as own_handle:
        handles = ranks.all_gather_bytes(own_handle.encoded + xxhash.xxh3_128_digest(checkpoint_id.encode()))
        if len({t[_HANDLE_BYTES:] for t in handles}) > 1:
            raise StorageError("the ranks see different checkpoints of the same step: a file system cache is stale")
        # There may be hundreds of other nodes, so only their number of steps is exchanged.
        local_ranks = [rank for rank, t in enumerate(handles) if t[:_NODE_BYTES] == own_handle.node]
        bitmaps = ranks.all_gather_bytes(bytes(bitmap)) if bitmap else [b""] * len(handles)
        schedule = schedule_loads({rank: _parse_bitmap(bitmaps[rank]) for rank in local_ranks}, chunks.sizes)
        steps = max(int.from_bytes(n, "big") for n in ranks.all_gather_bytes(len(schedule.steps).to_bytes(8, "big")))
        if steps:
            memory = _map_peer_memory(ranks, handles, local_ranks)
            if not _run_schedule(ranks, chunks, requests, schedule, steps, memory, fetch, pool):
                return None
        return set(requests) - schedule.shared


@dataclass(frozen=True)
class _MemoryHandle:
    """The location of a rank's memory."""

    node: bytes
    pid: int
    fd: int
    proof: bytes
    """The first bytes of the memory, because a process on another machine may have the same pid."""

    @property
    def encoded(self) -> bytes:
        return self.node + self.pid.to_bytes(8, "big") + self.fd.to_bytes(4, "big") + self.proof


def _parse_handle(data: bytes) -> _MemoryHandle:
    ends = [_NODE_BYTES, _NODE_BYTES + 8, _NODE_BYTES + 12, _HANDLE_BYTES]
    node, pid, fd, proof = data[: ends[0]], data[ends[0] : ends[1]], data[ends[1] : ends[2]], data[ends[2] : ends[3]]
    return _MemoryHandle(node, int.from_bytes(pid, "big"), int.from_bytes(fd, "big"), proof)


@contextmanager
def _create_shared_memory() -> Iterator[_MemoryHandle]:
    """Yield the handle of new memory for this rank. A rank that cannot allocate it counts as alone on its node."""
    fd = -1
    try:
        try:
            fd = os.memfd_create("clustertrain-loads")
            os.truncate(fd, 2 * LOAD_BYTES)
            proof = os.urandom(_PROOF_BYTES)
            os.pwrite(fd, proof, 0)
            handle = _MemoryHandle(_node_id(), os.getpid(), fd, proof)
        except (OSError, AttributeError):
            handle = _MemoryHandle(os.urandom(_NODE_BYTES), 0, 0, bytes(_PROOF_BYTES))
        yield handle
    finally:
        if fd >= 0:
            os.close(fd)


def _run_schedule(
    ranks: Ranks,
    chunks: ChunkTable,
    requests: Mapping[int, ChunkRequest],
    schedule: LoadSchedule,
    steps: int,
    memory: Mapping[int, memoryview],
    fetch: Callable[[Chunk, memoryview], None],
    pool: Executor,
) -> bool:
    """Run all steps, and return whether all reads succeeded on all ranks. Raise the error of this rank."""
    futures: list[Future[None]] = []

    def start_reads(step: int) -> None:
        load = schedule.loads_at(step).get(ranks.rank, [])
        for number, at, size in _iter_load_layout(load, chunks.sizes, step):
            futures.append(pool.submit(fetch, chunks[number], memory[ranks.rank][at : at + size]))

    try:
        start_reads(0)
        for step in range(steps):
            error = next((e for e in [f.exception() for f in futures] if e is not None), None)
            futures.clear()
            if any(r[0] for r in ranks.all_gather_bytes(bytes([error is not None]))):
                if error is not None:
                    raise error
                return False  # another rank raises the error
            # All ranks have filled their memory for this step, and have copied from the other half what they needed.
            start_reads(step + 1)
            for rank, load in schedule.loads_at(step).items():
                for number, at, size in _iter_load_layout(load, chunks.sizes, step):
                    for consumer in requests[number].consumers if number in requests else ():
                        consumer(memory[rank][at : at + size])
        return True
    finally:
        for f in futures:  # the memory is unmapped, so no read may still fill it
            if not f.cancel():
                f.exception()


def _iter_load_layout(load: Sequence[int], sizes: Mapping[int, int], step: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, offset in memory, bytes) of each chunk of a load."""
    offset = step % 2 * LOAD_BYTES
    for number in load:
        yield number, offset, sizes[number]
        offset += _aligned_size(sizes[number])


def _aligned_size(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _map_peer_memory(ranks: Ranks, handles: Sequence[bytes], local_ranks: Sequence[int]) -> dict[int, memoryview]:
    """Return the mapped memory of all ranks of this node, or raise SharedReadUnavailable on all ranks."""
    mapped: dict[int, memoryview] = {}
    error: Exception | None = None
    try:
        for rank in local_ranks if len(local_ranks) > 1 else ():
            handle = _parse_handle(handles[rank])
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR)
            try:
                mapped[rank] = memoryview(mmap.mmap(fd, 2 * LOAD_BYTES))
            finally:
                os.close(fd)
            if mapped[rank][:_PROOF_BYTES] != handle.proof:
                raise PermissionError(f"process {handle.pid} is a different process here")
    except (OSError, ValueError) as e:
        error = e
    if any(r[0] for r in ranks.all_gather_bytes(bytes([error is not None]))):
        raise SharedReadUnavailable(str(error or "another rank could not"))
    return mapped


def _node_id() -> bytes:
    """Return an identifier that is equal for processes that see each other in /proc."""
    parts = [socket.gethostname()]
    for proc_file in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        path = Path(proc_file)
        parts.append(path.readlink().name if path.is_symlink() else path.read_text())
    return hashlib.sha256("\n".join(parts).encode()).digest()[:_NODE_BYTES]


def _parse_bitmap(bitmap: bytes) -> frozenset[int]:
    return frozenset(8 * i + b for i, byte in enumerate(bitmap) if byte for b in range(8) if byte >> b & 1)
