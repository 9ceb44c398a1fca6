"""How a checkpoint is split into chunks, and which rank reads each chunk for the others."""

from __future__ import annotations

import random

import pytest

from clustertrain.checkpoint.format.checksums import BLOCK_BYTES
from clustertrain.checkpoint.format.manifest import ShardRecord, TensorRecord
from clustertrain.checkpoint.load import shared_read

SHAPES = [(4096, 1024), (3001, 1237), (5_000_011,), (96, 70, 513), (1, 4_000_000), (3_000_000, 1)]


def tensor(shape: tuple[int, ...], itemsize: int) -> TensorRecord:
    nbytes = itemsize
    for n in shape:
        nbytes *= n
    start = (0,) * len(shape)
    shard = ShardRecord(file="f", offset=0, nbytes=nbytes, start=start, shape=shape, blocks="", checksum="")
    return TensorRecord(name="x", kind="model", dtype="?", itemsize=itemsize, shape=shape, shards=(shard,))


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_are_consecutive_whole_rows(shape: tuple[int, ...], itemsize: int) -> None:
    record = tensor(shape, itemsize)
    shard = record.shards[0]
    assert shared_read.is_shareable(record, shard)
    chunks = shared_read._split_shard(record, shard, 0)
    row = shared_read.row_bytes(record, shard)
    at = 0
    for chunk in chunks:
        assert chunk.low == at and chunk.nbytes % row == 0
        assert 0 < chunk.nbytes <= shared_read.CHUNK_BYTES
        at += chunk.nbytes
    assert at == shard.nbytes


def test_chunks_align_with_blocks_if_rows_allow() -> None:
    record = tensor((8192, 1024), 4)
    assert all(c.low % BLOCK_BYTES == 0 for c in shared_read._split_shard(record, record.shards[0], 0))


def test_small_tensors_and_long_rows_are_not_shared() -> None:
    for shape in ((), (16, 16), (2, 10_000_000)):
        record = tensor(shape, 4)
        assert not shared_read.is_shareable(record, record.shards[0])


@pytest.mark.parametrize("seed", range(5))
def test_chunk_needed_by_several_is_read_once(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {c: rng.randint(1, shared_read.CHUNK_BYTES) for c in range(200)}
    members = sorted(rng.sample(range(64), rng.randint(1, 8)))
    needed = {r: frozenset(c for c in sizes if rng.random() < 0.4) for r in members}
    loads = shared_read.schedule_loads(needed, sizes)
    assert loads.shared == {c for c in sizes if sum(c in w for w in needed.values()) > 1}
    read = [c for step in loads.steps for load in step.values() for c in load]
    assert sorted(read) == sorted(loads.shared)
    for n, step in enumerate(loads.steps):
        assert set(step) <= set(members)
        for load in step.values():
            end = n % 2 * shared_read.LOAD_BYTES
            for _, at, size in shared_read._iter_load_layout(load, sizes, n):
                assert at >= end  # no two chunks overlap
                end = at + size
            assert end <= (n % 2 + 1) * shared_read.LOAD_BYTES
