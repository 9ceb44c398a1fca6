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
WORTH_IT = 1 << 20  # bytes; a smaller tensor each rank reads by itself
_NODE_BYTES = 16
_PROOF_BYTES = 16
_TOLD_BYTES = _NODE_BYTES + 8 + 4 + _PROOF_BYTES
_ALIGN = 64

Take = Callable[[memoryview], None]


@dataclass(frozen=True)
class Chunk:
    """Rows of a shard: ``nbytes`` from ``low`` on. ``number`` is the same on all ranks."""

    number: int
    shard: ShardRecord
    low: int
    nbytes: int


class Chunks:
    """How the tensors of a checkpoint are cut: by whole rows, so that a part of each row is a part of one chunk, and
    where it can be at the blocks of the checksums, so that no block is read twice. ``sizes`` by number, as the files
    have them one after another."""

    def __init__(self, manifest: Manifest) -> None:
        self._first: dict[tuple[str, int], int] = {}
        self._all: list[Chunk] = []
        for tensor in manifest.tensors:
            for n, shard in enumerate(tensor.shards):
                if fits(tensor, shard):
                    self._first[tensor.name, n] = len(self._all)
                    self._all += _cut(tensor, shard, len(self._all))
        in_order = sorted(self._all, key=lambda c: (c.shard.file, c.shard.offset + c.low))
        self.sizes = {c.number: c.nbytes for c in in_order}

    @property
    def count(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Chunk:
        return self._all[number]

    def of(self, tensor: TensorRecord, n: int, start: int, stop: int) -> Iterator[tuple[Chunk, int, int]]:
        """Those that hold the rows from ``start`` to ``stop`` of shard number ``n``, each with the rows in it."""
        rows = rows_of(tensor, tensor.shards[n])
        for k in range(start // rows, -(-stop // rows)):
            yield self._all[self._first[tensor.name, n] + k], max(start, k * rows), min(stop, (k + 1) * rows)


def _cut(tensor: TensorRecord, shard: ShardRecord, first: int) -> list[Chunk]:
    step = rows_of(tensor, shard) * row_bytes(tensor, shard)
    return [
        Chunk(first + k, shard, low, min(step, shard.nbytes - low))
        for k, low in enumerate(range(0, shard.nbytes, step))
    ]


def row_bytes(tensor: TensorRecord, shard: ShardRecord) -> int:
    return tensor.itemsize * prod(shard.shape[1:])


def fits(tensor: TensorRecord, shard: ShardRecord) -> bool:
    """Whether a shard can be shared in chunks."""
    return bool(shard.shape) and shard.nbytes >= WORTH_IT and row_bytes(tensor, shard) <= CHUNK_BYTES


def rows_of(tensor: TensorRecord, shard: ShardRecord) -> int:
    """In a chunk."""
    size = row_bytes(tensor, shard)
    even = BLOCK_BYTES // gcd(BLOCK_BYTES, size)  # so many end where a block does
    most = CHUNK_BYTES // size
    return most // even * even or most


@dataclass
class Wanted:
    """What this rank takes from a chunk."""

    chunk: Chunk
    takes: list[Take] = field(default_factory=list)


class CannotShare(Exception):
    """The ranks of a node do not see each other's memory."""


@dataclass(frozen=True)
class Loads:
    """Of one node: which rank reads what in which step."""

    steps: list[dict[int, list[int]]]  # the chunks' numbers, by rank
    shared: frozenset[int]

    def of(self, step: int) -> dict[int, list[int]]:
        return self.steps[step] if step < len(self.steps) else {}


def loads_of(wanted: Mapping[int, frozenset[int]], sizes: Mapping[int, int]) -> Loads:
    """``wanted`` by the ranks of the node. ``sizes`` of all chunks, in the order in which they should be read."""
    times = Counter(c for chunks in wanted.values() for c in chunks)
    shared = [c for c in sizes if times[c] > 1]
    loads: list[list[int]] = []
    room = 0
    for c in shared:
        if _spaced(sizes[c]) > room:
            loads.append([])
            room = LOAD_BYTES
        loads[-1].append(c)
        room -= _spaced(sizes[c])
    n = len(wanted)
    steps = [dict(zip(wanted, loads[at : at + n], strict=False)) for at in range(0, len(loads), n)]
    return Loads(steps, frozenset(shared))


def read(
    ranks: Ranks,
    which: str,
    chunks: Chunks,
    wanted: Mapping[int, Wanted],
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
        CannotShare: on all ranks.
        StorageError: on all ranks, they do not see the same checkpoint.
        whatever ``fetch`` raises.
    """
    bitmap = bytearray(-(-chunks.count // 8))
    for c in wanted:
        bitmap[c // 8] |= 1 << c % 8
    with _own_memory() as me:
        told = ranks.records(me.told + xxhash.xxh3_128_digest(which.encode()))
        if len({t[_TOLD_BYTES:] for t in told}) > 1:
            raise StorageError("the ranks see different checkpoints of the same step: the file system is behind")
        # Of other nodes no rank needs to know more than how many steps they take: there may be hundreds.
        members = [rank for rank, t in enumerate(told) if t[:_NODE_BYTES] == me.node]
        bitmaps = ranks.records(bytes(bitmap)) if bitmap else [b""] * len(told)
        plan = loads_of({rank: _numbers(bitmaps[rank]) for rank in members}, chunks.sizes)
        steps = max(int.from_bytes(n, "big") for n in ranks.records(len(plan.steps).to_bytes(8, "big")))
        if steps:
            memory = _windows(ranks, told, members)
            if not _step_by_step(ranks, chunks, wanted, plan, steps, memory, fetch, pool):
                return None
        return set(wanted) - plan.shared


@dataclass(frozen=True)
class _Place:
    """Where a rank's memory is to be found. ``proof`` is what lies at its beginning: a process of another machine may
    have the same number."""

    node: bytes
    pid: int
    fd: int
    proof: bytes

    @property
    def told(self) -> bytes:
        return self.node + self.pid.to_bytes(8, "big") + self.fd.to_bytes(4, "big") + self.proof


def _place(told: bytes) -> _Place:
    at = [_NODE_BYTES, _NODE_BYTES + 8, _NODE_BYTES + 12, _TOLD_BYTES]
    node, pid, fd, proof = told[: at[0]], told[at[0] : at[1]], told[at[1] : at[2]], told[at[2] : at[3]]
    return _Place(node, int.from_bytes(pid, "big"), int.from_bytes(fd, "big"), proof)


@contextmanager
def _own_memory() -> Iterator[_Place]:
    """Of this rank. One that cannot have any is alone on a node of its own."""
    fd = -1
    try:
        try:
            fd = os.memfd_create("clustertrain-loads")
            os.truncate(fd, 2 * LOAD_BYTES)
            proof = os.urandom(_PROOF_BYTES)
            os.pwrite(fd, proof, 0)
            place = _Place(_node(), os.getpid(), fd, proof)
        except (OSError, AttributeError):
            place = _Place(os.urandom(_NODE_BYTES), 0, 0, bytes(_PROOF_BYTES))
        yield place
    finally:
        if fd >= 0:
            os.close(fd)


def _step_by_step(
    ranks: Ranks,
    chunks: Chunks,
    wanted: Mapping[int, Wanted],
    plan: Loads,
    steps: int,
    memory: Mapping[int, memoryview],
    fetch: Callable[[Chunk, memoryview], None],
    pool: Executor,
) -> bool:
    """Whether all went well on all ranks. Raises what went wrong on this one."""
    filling: list[Future[None]] = []

    def begin(step: int) -> None:
        load = plan.of(step).get(ranks.rank, [])
        for c, at, size in _places(load, chunks.sizes, step):
            filling.append(pool.submit(fetch, chunks[c], memory[ranks.rank][at : at + size]))

    try:
        begin(0)
        for step in range(steps):
            trouble = next((e for e in [f.exception() for f in filling] if e is not None), None)
            filling.clear()
            if any(r[0] for r in ranks.records(bytes([trouble is not None]))):
                if trouble is not None:
                    raise trouble
                return False  # another rank tells why
            # All have filled their memory for this step, and have taken from the other half what they needed.
            begin(step + 1)
            for rank, load in plan.of(step).items():
                for c, at, size in _places(load, chunks.sizes, step):
                    for take in wanted[c].takes if c in wanted else ():
                        take(memory[rank][at : at + size])
        return True
    finally:
        for f in filling:  # the memory goes, so nobody may be filling it
            if not f.cancel():
                f.exception()


def _places(load: Sequence[int], sizes: Mapping[int, int], step: int) -> Iterator[tuple[int, int, int]]:
    """Of each chunk of a load: its number, where it lies and how large it is."""
    at = step % 2 * LOAD_BYTES
    for c in load:
        yield c, at, sizes[c]
        at += _spaced(sizes[c])


def _spaced(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _windows(ranks: Ranks, told: Sequence[bytes], members: Sequence[int]) -> dict[int, memoryview]:
    """The memory of all ranks of this node. Raises CannotShare, on all ranks."""
    found: dict[int, memoryview] = {}
    cannot: Exception | None = None
    try:
        for rank in members if len(members) > 1 else ():
            place = _place(told[rank])
            fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR)
            try:
                found[rank] = memoryview(mmap.mmap(fd, 2 * LOAD_BYTES))
            finally:
                os.close(fd)
            if found[rank][:_PROOF_BYTES] != place.proof:
                raise PermissionError(f"process {place.pid} is another one here")
    except (OSError, ValueError) as e:
        cannot = e
    if any(r[0] for r in ranks.records(bytes([cannot is not None]))):
        raise CannotShare(str(cannot or "another rank could not"))
    return found


def _node() -> bytes:
    """The same for processes that see each other in /proc."""
    words = [socket.gethostname()]
    for place in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        path = Path(place)
        words.append(path.readlink().name if path.is_symlink() else path.read_text())
    return hashlib.sha256("\n".join(words).encode()).digest()[:_NODE_BYTES]


def _numbers(bitmap: bytes) -> frozenset[int]:
    return frozenset(8 * i + b for i, byte in enumerate(bitmap) if byte for b in range(8) if byte >> b & 1)
