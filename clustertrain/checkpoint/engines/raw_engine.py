"""Segments one after another in one file a rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from clustertrain.checkpoint import points
from clustertrain.checkpoint.manifest import TensorRecord
from clustertrain.checkpoint.segments import Place, Segment

# So much at a time, and started on its way to the disk at once: the fsync at the end then finds little left to do.
CHUNK_BYTES = 16 << 20


class RawEngine:
    name = "raw"
    patterns = ("rank-{rank}.bin",)

    def write(self, folder: Path, rank: int, segments: Sequence[Segment], memory: memoryview) -> list[Place]:
        name = f"rank-{rank}.bin"
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        try:
            places, offset = [], 0
            for segment in segments:
                points.reached("while writing", rank)
                _write(fd, memory[segment.at : segment.at + segment.nbytes])
                places.append(Place(file=name, offset=offset))
                offset += segment.nbytes
            os.fsync(fd)
        finally:
            os.close(fd)
        return places

    def finish(self, folder: Path, tensors: Sequence[TensorRecord]) -> None:
        """Nothing: the manifest is the index."""


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data[:CHUNK_BYTES]) :]


def make() -> RawEngine:
    return RawEngine()
