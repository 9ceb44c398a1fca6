"""The raw engine: the staging buffer of a rank as one file, and what is frozen in another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from clustertrain.checkpoint.core import fault_points
from clustertrain.checkpoint.format import direct_io
from clustertrain.checkpoint.format.manifest import TensorRecord
from clustertrain.checkpoint.format.staged_segments import Segment, SegmentLocation

CHUNK_BYTES = 32 << 20


class RawEngine:
    name = "raw"
    patterns = ("rank-{rank}.bin", "rank-{rank}.frozen-*.bin")
    frozen_pattern = "rank-{rank}.frozen-*.bin"

    def write(self, folder: Path, rank: int, segments: Sequence[Segment], memory: memoryview) -> list[SegmentLocation]:
        """Write the pages of ``memory`` that have segments, so that the disk can read them directly from there."""
        name = f"rank-{rank}.bin"
        files = {name: [n for n, s in enumerate(segments) if s.nbytes and not s.is_frozen]}
        if frozen := [n for n, s in enumerate(segments) if s.nbytes and s.is_frozen]:
            files[self._new_frozen_name(folder, rank)] = frozen
        locations = [SegmentLocation(file=name, offset=0)] * len(segments)
        for file, numbers in files.items():
            offsets = _write_file(folder / file, rank, [segments[n] for n in numbers], memory)
            for n, offset in zip(numbers, offsets, strict=True):
                locations[n] = SegmentLocation(file=file, offset=offset)
        return locations

    def _new_frozen_name(self, folder: Path, rank: int) -> str:
        """Return a name that no link to a file of an earlier checkpoint has."""
        pattern = self.frozen_pattern.format(rank=rank)
        prefix, suffix = pattern.split("*")
        numbers = [p.name.removeprefix(prefix).removesuffix(suffix) for p in folder.glob(pattern)]
        return f"{prefix}{max((int(n) for n in numbers if n.isdecimal()), default=-1) + 1}{suffix}"

    def finish(self, folder: Path, tensors: Sequence[TensorRecord]) -> None:
        """Do nothing: the manifest suffices."""


def _write_file(path: Path, rank: int, segments: Sequence[Segment], memory: memoryview) -> list[int]:
    """Write the pages of the segments into a new file, and return the offset of each segment there."""
    offsets, size = [0] * len(segments), 0
    with direct_io.open_for_write(path) as file:
        runs = list(_iter_runs(segments))
        for run in runs:
            low = end = written = _page_start(segments[run[0]].buffer_offset)
            for n in run:
                fault_points.fault_point("during_write", rank)
                offsets[n] = size + segments[n].buffer_offset - low
                end = max(end, segments[n].buffer_offset + segments[n].nbytes)
                while end - written >= CHUNK_BYTES:
                    file.write(memory[written : written + CHUNK_BYTES])
                    written += CHUNK_BYTES
            if run is not runs[-1]:
                end = _page_end(end)
            file.write(memory[written:end])
            size += end - low
    return offsets


def _iter_runs(segments: Sequence[Segment]) -> Iterator[list[int]]:
    """Yield the numbers of segments whose pages are consecutive, in the order of the memory."""
    run: list[int] = []
    for n in sorted(range(len(segments)), key=lambda n: segments[n].buffer_offset):
        last = segments[run[-1]] if run else None
        if last and _page_start(segments[n].buffer_offset) > _page_end(last.buffer_offset + last.nbytes):
            yield run
            run = []
        run.append(n)
    if run:
        yield run


def _page_start(offset: int) -> int:
    return offset - offset % direct_io.ALIGN


def _page_end(offset: int) -> int:
    return _page_start(offset + direct_io.ALIGN - 1)


def make() -> RawEngine:
    return RawEngine()
