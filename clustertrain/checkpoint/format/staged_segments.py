"""What is handed from the training process to the one that writes: staged blocks of tensors, and where they end up."""

from __future__ import annotations

import msgspec

from clustertrain.checkpoint.format.manifest import TensorKind


class Segment(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # many, and no cycles
    """A rank's block of a logical tensor in its staging memory: ``nbytes`` at ``at``, in C order, ``part`` elements
    that begin at ``start`` of the tensor of shape ``shape``. ``dtype`` is torch's name of it, ``itemsize`` in bytes."""

    name: str
    kind: TensorKind
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    start: tuple[int, ...]
    part: tuple[int, ...]
    at: int
    nbytes: int


class SegmentLocation(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # many, and no cycles
    """Where an engine put a segment: its bytes, as they were staged, begin at ``offset`` of ``file`` (a path relative
    to the checkpoint's folder, with ``/``)."""

    file: str
    offset: int
