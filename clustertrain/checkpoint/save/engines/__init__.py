"""Engines write the bytes of a checkpoint: the staged segments of a rank go into files, and the offsets are returned.

Checksums, manifest, commit and reading are the same for all engines. Whatever an engine's files contain besides, the
bytes of a segment are in one piece and unchanged. So every checkpoint can be read by offset, without its engine,
without torch and without unpickling.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from clustertrain.checkpoint.format.manifest import TensorRecord
from clustertrain.checkpoint.format.staged_segments import Segment, SegmentLocation

# Engines are imported on demand: two of them import torch, which takes seconds.
ENGINES = ("raw", "dcp", "torchsnapshot")


class Engine(Protocol):
    """Runs in the writer process, which is in no process group.

    ``patterns`` match all files that a rank may write, relative to the folder and with ``{rank}``; they are used to
    remove what a killed writer left.
    """

    name: str
    patterns: tuple[str, ...]

    def write(self, folder: Path, rank: int, segments: Sequence[Segment], memory: memoryview) -> list[SegmentLocation]:
        """Write the segments of ``rank`` into new files of its own in ``folder``, durable on return.

        Args:
            memory: the staging buffer, to which ``Segment.buffer_offset`` refers.

        Returns:
            The location of each segment, in their order; any location for a segment without bytes.

        Raises:
            OSError: the disk is full, the quota is spent, …
        """
        ...

    def finish(self, folder: Path, tensors: Sequence[TensorRecord]) -> None:
        """Write what the engine's own tools need to read the checkpoint, durable on return. On rank 0, before the
        commit, when all ranks have written.

        Raises:
            OSError: as :meth:`write`.
        """
        ...


def get_engine(name: str) -> Engine:
    """Return the engine of that name, one of :data:`ENGINES`."""
    module = importlib.import_module(f"clustertrain.checkpoint.save.engines.{name}")
    instance: Engine = module.make()
    return instance
