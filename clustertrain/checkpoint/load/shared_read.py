"""Reading once what several ranks of a node need: replicas all of it, shards of another dimension a part of each row.

The ranks of a node go through what is wanted by two of them or more in steps. In each step every rank reads and
verifies one load into memory that the others see, and then takes from all loads what it needs, while it reads the next.
So the file system is asked for each byte once a node, and it is verified once.
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

from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.format.checksums import BLOCK_BYTES
from clustertrain.checkpoint.format.manifest import Manifest, ShardRecord, TensorRecord
from clustertrain.checkpoint.format.storage_errors import StorageError

CHUNK_BYTES = 4 * BLOCK_BYTES
LOAD_BYTES = 2 * CHUNK_BYTES  # a rank has two of them in memory meanwhile
MIN_SHARED_BYTES = 1 << 20  # bytes; a smaller tensor each rank reads by itself
_NODE_BYTES = 16
_PROOF_BYTES = 16
_HANDLE_BYTES = _NODE_BYTES + 8 + 4 + _PROOF_BYTES
_ALIGN = 64

Consumer = Callable[[memoryview], None]


@dataclass(frozen=True)
class Chunk:
    """Rows of a shard: ``nbytes`` from ``low`` on. ``number`` is the same on all ranks."""

    number: int
    shard: ShardRecord
    low: int
    nbytes: int


class ChunkTable:
    """How the tensors of a checkpoint are cut: by whole rows, so that a part of each row is a part of one chunk, and
    where it can be at the blocks of the checksums, so that no block is read twice. ``sizes`` by number, as the files
    have them one after another."""

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
        """Those that hold the rows from ``start`` to ``stop`` of shard number ``n``, each with the rows in it."""
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
    """Whether a shard can be shared in chunks."""
    return bool(shard.shape) and shard.nbytes >= MIN_SHARED_BYTES and row_bytes(tensor, shard) <= CHUNK_BYTES


def rows_per_chunk(tensor: TensorRecord, shard: ShardRecord) -> int:
    """In a chunk."""
    size = row_bytes(tensor, shard)
    rows_per_block = BLOCK_BYTES // gcd(BLOCK_BYTES, size)  # so many end where a block does
    max_rows = CHUNK_BYTES // size
    return max_rows // rows_per_block * rows_per_block or max_rows


@dataclass
class ChunkRequest:
    """What this rank takes from a chunk."""

    chunk: Chunk
    consumers: list[Consumer] = field(default_factory=list)


class SharedReadUnavailable(Exception):
    """The ranks of a node do not see each other's memory."""


@dataclass(frozen=True)
class LoadSchedule:
    """Of one node: which rank reads what in which step."""

    steps: list[dict[int, list[int]]]  # the chunks' numbers, by rank
    shared: frozenset[int]

    def loads_at(self, step: int) -> dict[int, list[int]]:
        return self.steps[step] if step < len(self.steps) else {}


def schedule_loads(chunks_by_rank: Mapping[int, frozenset[int]], sizes: Mapping[int, int]) -> LoadSchedule:
    """``chunks_by_rank`` by the ranks of the node. ``sizes`` of all chunks, in the order in which they should be
    read."""
    use_counts = Counter(c for chunks in chunks_by_rank.values() for c in chunks)
    shared = [c for c in sizes if use_counts[c] > 1]
    loads: list[list[int]] = []
    room = 0
    for c in shared:
        if _aligned_size(sizes[c]) > room:
            loads.append([])
            room = LOAD_BYTES
        loads[-1].append(c)
        room -= _aligned_size(sizes[c])
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
    """Collective: take from the chunks that another rank of this node wants too; returns the numbers of the others.

    A rank that cannot read what the others need raises, and all stop at the same step: the others get None, and the
    ranks have to tell each other why.

    Args:
        which: a name of the checkpoint that no other one has.
        wanted: by the chunk's number.
        fetch: fills memory with a chunk, verified.

    Raises:
        SharedReadUnavailable: on all ranks.
        StorageError: on all ranks, they do not see the same checkpoint.
        whatever ``fetch`` raises.
    """
    bitmap = bytearray(-(-chunks.count // 8))
    for number in requests:
        bitmap[number // 8] |= 1 << number % 8
    with _create_shared_memory() as own_handle:
        handles = ranks.all_gather_bytes(own_handle.encoded + xxhash.xxh3_128_digest(checkpoint_id.encode()))
        if len({t[_HANDLE_BYTES:] for t in handles}) > 1:
            raise StorageError("the ranks see different checkpoints of the same step: the file system is behind")
        # Of other nodes no rank needs to know more than how many steps they take: there may be hundreds.
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
    """Where a rank's memory is to be found. ``proof`` is what lies at its beginning: a process of another machine may
    have the same number."""

    node: bytes
    pid: int
    fd: int
    proof: bytes

    @property
    def encoded(self) -> bytes:
        return self.node + self.pid.to_bytes(8, "big") + self.fd.to_bytes(4, "big") + self.proof


def _parse_handle(data: bytes) -> _MemoryHandle:
    ends = [_NODE_BYTES, _NODE_BYTES + 8, _NODE_BYTES + 12, _HANDLE_BYTES]
    node, pid, fd, proof = data[: ends[0]], data[ends[0] : ends[1]], data[ends[1] : ends[2]], data[ends[2] : ends[3]]
    return _MemoryHandle(node, int.from_bytes(pid, "big"), int.from_bytes(fd, "big"), proof)


@contextmanager
def _create_shared_memory() -> Iterator[_MemoryHandle]:
    """Of this rank. One that cannot have any is alone on a node of its own."""
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
    """Whether all went well on all ranks. Raises what went wrong on this one."""
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
                return False  # another rank tells why
            # All have filled their memory for this step, and have taken from the other half what they needed.
            start_reads(step + 1)
            for rank, load in schedule.loads_at(step).items():
                for number, at, size in _iter_load_layout(load, chunks.sizes, step):
                    for consumer in requests[number].consumers if number in requests else ():
                        consumer(memory[rank][at : at + size])
        return True
    finally:
        for f in futures:  # the memory goes, so nobody may be filling it
            if not f.cancel():
                f.exception()


def _iter_load_layout(load: Sequence[int], sizes: Mapping[int, int], step: int) -> Iterator[tuple[int, int, int]]:
    """Of each chunk of a load: its number, where it lies and how large it is."""
    offset = step % 2 * LOAD_BYTES
    for number in load:
        yield number, offset, sizes[number]
        offset += _aligned_size(sizes[number])


def _aligned_size(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _map_peer_memory(ranks: Ranks, handles: Sequence[bytes], local_ranks: Sequence[int]) -> dict[int, memoryview]:
    """The memory of all ranks of this node. Raises SharedReadUnavailable, on all ranks."""
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
                raise PermissionError(f"process {handle.pid} is another one here")
    except (OSError, ValueError) as e:
        error = e
    if any(r[0] for r in ranks.all_gather_bytes(bytes([error is not None]))):
        raise SharedReadUnavailable(str(error or "another rank could not"))
    return mapped


def _node_id() -> bytes:
    """The same for processes that see each other in /proc."""
    parts = [socket.gethostname()]
    for proc_file in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        path = Path(proc_file)
        parts.append(path.readlink().name if path.is_symlink() else path.read_text())
    return hashlib.sha256("\n".join(parts).encode()).digest()[:_NODE_BYTES]


def _parse_bitmap(bitmap: bytes) -> frozenset[int]:
    return frozenset(8 * i + b for i, byte in enumerate(bitmap) if byte for b in range(8) if byte >> b & 1)
