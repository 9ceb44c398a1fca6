"""Helpers for engines based on libraries: staged segments as tensors, and verification of their offsets."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from clustertrain.checkpoint.format.staged_segments import Segment, SegmentLocation
from clustertrain.errors import CheckpointError

# Bytes to read back at each end of a segment.
EDGE_BYTES = 64


def segment_bytes(segment: Segment, memory: memoryview) -> memoryview:
    return memory[segment.buffer_offset : segment.buffer_offset + segment.nbytes]


def bytes_to_tensor(data: memoryview) -> torch.Tensor:
    """Return ``data`` as a uint8 tensor without a copy.

    Its storage has exactly that size, because DCP copies larger ones.
    """
    with warnings.catch_warnings():
        # The memory is read-only, and the engines only read it.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(data, dtype=torch.uint8)


def fsync_and_verify(
    folder: Path, segments: Sequence[Segment], locations: Sequence[SegmentLocation], memory: memoryview
) -> None:
    """Make the files durable, and verify that each segment is at its location.

    Raises:
        CheckpointError: a segment is not there, because the library writes an unexpected format.
        OSError: the file system failed.
    """
    segments_by_file: dict[str, list[tuple[int, Segment]]] = {}
    for location, segment in zip(locations, segments, strict=True):
        segments_by_file.setdefault(location.file, []).append((location.offset, segment))
    for name, file_segments in segments_by_file.items():
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
            for offset, segment in file_segments:
                data = segment_bytes(segment, memory)
                edge = min(EDGE_BYTES, len(data))
                ends = [os.pread(file.fileno(), edge, pos) for pos in (offset, offset + len(data) - edge)]
                if ends != [data[:edge].tobytes(), data[len(data) - edge :].tobytes()]:
                    raise CheckpointError(
                        f"{folder / name}: the bytes at offset {offset} are not those of {segment.name} "
                        f"(start {list(segment.start)})",
                        fix='use engine = "raw", and report this with the versions of torch and torchsnapshot',
                    )
