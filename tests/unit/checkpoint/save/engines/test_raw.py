"""The raw engine writes whole pages of the buffer: everything, or only the segments that no link has."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from clustertrain.checkpoint.format import direct_io
from clustertrain.checkpoint.format.staged_segments import Segment
from clustertrain.checkpoint.save.engines.raw import CHUNK_BYTES, RawEngine


def staged(sizes: list[int], frozen: set[int]) -> tuple[list[Segment], memoryview]:
    """Return segments at the offsets that a staging buffer gives them, and a buffer of random bytes."""
    segments, end = [], 0
    for n, size in enumerate(sizes):
        align = direct_io.ALIGN if size >= 1 << 20 else 64
        offset = -(-end // align) * align
        end = offset + size
        segments.append(
            Segment(
                name=str(n), kind="model", dtype="uint8", itemsize=1, shape=(size,), start=(0,), chunk_shape=(size,),
                buffer_offset=offset, nbytes=size, is_frozen=n in frozen,
            )
        )  # fmt: skip
    return segments, memoryview(os.urandom(max(end, 1)))


def written(folder: Path, segments: list[Segment], memory: memoryview, rank: int = 0) -> list[str]:
    """Write the segments, compare each with its bytes in the file, and return the files."""
    locations = RawEngine().write(folder, rank, segments, memory)
    for segment, location in zip(segments, locations, strict=True):
        data = (folder / location.file).read_bytes()[location.offset : location.offset + segment.nbytes]
        assert data == memory[segment.buffer_offset : segment.buffer_offset + segment.nbytes]
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.long
def test_all_segments_are_the_buffer_as_it_is(tmp_path: Path) -> None:
    segments, memory = staged([5, 0, 70_000, CHUNK_BYTES + 4097, 3 << 20, 1], frozen=set())
    assert written(tmp_path, segments, memory) == ["rank-0.bin"]
    assert (tmp_path / "rank-0.bin").read_bytes() == memory


def test_nothing_to_write(tmp_path: Path) -> None:
    assert written(tmp_path, [], memoryview(b"")) == ["rank-0.bin"]
    assert (tmp_path / "rank-0.bin").stat().st_size == 0


@pytest.mark.parametrize("seed", range(8))
def test_any_subset_of_the_segments(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    sizes = [choose.choice([0, 1, 64, 5000, 300_000, (1 << 20) + 3, 2 << 20]) for _ in range(20)]
    segments, memory = staged(sizes, {n for n in range(20) if choose.random() < 0.5})
    chosen = [s for s in segments if choose.random() < 0.5]
    choose.shuffle(chosen)
    written(tmp_path, chosen, memory)
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= sum(s.nbytes + 2 * direct_io.ALIGN for s in chosen)


def test_frozen_segments_get_a_new_name_beside_links(tmp_path: Path) -> None:
    for name in ("rank-1.frozen-0.bin", "rank-1.frozen-11.bin", "rank-10.frozen-70.bin"):
        (tmp_path / name).touch()
    segments, memory = staged([100, 2 << 20], frozen={1})
    names = written(tmp_path, segments, memory, rank=1)
    assert "rank-1.frozen-12.bin" in names and len(names) == 5
