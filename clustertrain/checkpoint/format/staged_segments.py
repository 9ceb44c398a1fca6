"""Staged shards of tensors, which a rank passes to its writer process, and their places in the files."""

from __future__ import annotations

import msgspec

from clustertrain.checkpoint.format.manifest import TensorKind

MIN_FROZEN_BYTES = 1 << 20  # fewer bytes of a rank are not worth a file of their own

# The keys in done-files are older than the names here.
_SEGMENT_KEYS = {"chunk_shape": "part", "buffer_offset": "at"}


class Segment(msgspec.Struct, frozen=True, kw_only=True, gc=False, rename=_SEGMENT_KEYS):  # gc: many, and no cycles
    """A rank's shard of a logical tensor in its staging buffer, in C order."""

    name: str
    kind: TensorKind
    dtype: str
    """The name in torch, without "torch."."""
    itemsize: int
    """Bytes per element."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    """Offsets of the shard in the tensor, one per dimension."""
    chunk_shape: tuple[int, ...]
    """Shape of the shard."""
    buffer_offset: int
    nbytes: int
    is_frozen: bool = False
    """Training is not expected to change it. An engine may write it into a file that later checkpoints link."""


class SegmentLocation(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # gc: many, and no cycles
    """The place of a segment's bytes, unchanged, in a file of the checkpoint."""

    file: str
    """Relative to the checkpoint's folder, with ``/``."""
    offset: int
