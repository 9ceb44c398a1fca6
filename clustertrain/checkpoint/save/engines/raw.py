"""The raw engine: the staging buffer of a rank as one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clustertrain.checkpoint.core import fault_points
from clustertrain.checkpoint.format import direct_io
from clustertrain.checkpoint.format.manifest import TensorRecord
from clustertrain.checkpoint.format.staged_segments import Segment, SegmentLocation

CHUNK_BYTES = 32 << 20


class RawEngine:
    name = "raw"
    patterns = ("rank-{rank}.bin",)

    def write(self, folder: Path, rank: int, segments: Sequence[Segment], memory: memoryview) -> list[SegmentLocation]:
        """Write each segment at its offset in ``memory``, so that the disk can read it directly from there."""
        name = f"rank-{rank}.bin"
        with direct_io.open_for_write(folder / name) as file:
            written = staged_end = 0
            for segment in segments:
                fault_points.fault_point("during_write", rank)
                staged_end = max(staged_end, segment.buffer_offset + segment.nbytes)
                while staged_end - written >= CHUNK_BYTES:
                    file.write(memory[written : written + CHUNK_BYTES])
                    written += CHUNK_BYTES
            file.write(memory[written:staged_end])
        return [SegmentLocation(file=name, offset=s.buffer_offset) for s in segments]

    def finish(self, folder: Path, tensors: Sequence[TensorRecord]) -> None:
        """Do nothing: the manifest suffices."""


def make() -> RawEngine:
    return RawEngine()
