"""Engines write the staged segments of a rank into files, and return the offsets.

Checksums, manifest, commit and reading are the same for all engines. Whatever else an engine's files contain, the bytes
of a segment are contiguous and unchanged. Every checkpoint can therefore be read by offset, without its engine, without
torch and without unpickling.
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
    """An engine, which runs in the writer process and therefore without a process group."""

    name: str
    patterns: tuple[str, ...]
    """Glob patterns of all files that a rank may write, relative to the folder and with ``{rank}``. They find the files
    of a killed writer."""
    frozen_pattern: str
    """The one of them for files that contain only frozen segments, and that later checkpoints may link; empty without
    such files."""

    def write(self, folder: Path, rank: int, segments: Sequence[Segment], memory: memoryview) -> list[SegmentLocation]:
        """Write the segments of ``rank`` into new files in ``folder``, which are durable on return.

        Args:
            memory: the staging buffer, to which ``Segment.buffer_offset`` refers.

        Returns:
            The location of each segment, in their order; any location for a segment without bytes.

        Raises:
            OSError: the disk is full, the quota is exhausted, …
        """
        ...

    def finish(self, folder: Path, tensors: Sequence[TensorRecord]) -> None:
        """Write the files that the engine's own tools need to read the checkpoint, which are durable on return.

        Called on rank 0 before the commit, when all ranks have written.

        Raises:
            OSError: see :meth:`write`.
        """
        ...


def get_engine(name: str) -> Engine:
    """Return the engine ``name``, one of :data:`ENGINES`."""
    module = importlib.import_module(f"clustertrain.checkpoint.save.engines.{name}")
    instance: Engine = module.make()
    return instance
