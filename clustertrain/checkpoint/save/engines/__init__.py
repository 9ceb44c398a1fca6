"""Who writes the bytes of a checkpoint. An engine puts a rank's staged segments into files and tells where each of them
lies; all else (checksums, index, commit, reading) is the same for all and not the engine's.

Whatever an engine wraps around a tensor in its files, the tensor's own bytes lie there as they are, in one piece. So a
checkpoint is read by offset, whoever wrote it: without that engine, without torch, and without unpickling anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from clustertrain.checkpoint.format.manifest import TensorRecord
from clustertrain.checkpoint.format.staged_segments import Segment, SegmentLocation

# Modules are imported when an engine is asked for: two of them need torch, which takes seconds.
ENGINES = ("raw", "dcp", "torchsnapshot")


class Engine(Protocol):
    """Runs in the process that writes in the background, which is in no process group.

    ``patterns`` are those of the files that a rank writes, relative to the folder, with ``{rank}``: what a writer left
    that was killed.
    """

    name: str
    patterns: tuple[str, ...]

    def write(self, folder: Path, rank: int, segments: Sequence[Segment], memory: memoryview) -> list[SegmentLocation]:
        """Write the segments of ``rank`` into files of its own in ``folder``, never over what is there; durable
        when it returns.

        Args:
            memory: the staging memory, that ``Segment.buffer_offset`` counts in.

        Returns: one place a segment, in their order. A segment of no bytes may be anywhere.

        Raises:
            OSError: the disk is full, the quota is spent, …
        """
        ...

    def finish(self, folder: Path, tensors: Sequence[TensorRecord]) -> None:
        """On rank 0, when all ranks have written and before the commit: what the engine's own tools need to read it.
        Durable when it returns.

        Raises:
            OSError: as above.
        """
        ...


def get_engine(name: str) -> Engine:
    """The engine of that name, one of :data:`ENGINES`."""
    module = importlib.import_module(f"clustertrain.checkpoint.save.engines.{name}")
    instance: Engine = module.make()
    return instance
