"""Writer of safetensors files that holds one tensor in memory at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertrain.checkpoint.format.manifest import TensorRecord
from clustertrain.checkpoint.format.safetensors_files import DTYPES
from clustertrain.errors import CheckpointError


@dataclass(frozen=True)
class ExportTensor:
    """A tensor of the export."""

    name: str
    """Name in the exported file."""
    dtype: str
    """Dtype in the exported file."""
    itemsize: int
    """Bytes per element in the exported file."""
    record: TensorRecord
    """The tensor in the checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


ReadTensor = Callable[[ExportTensor], Iterable[memoryview]]  # yields the bytes of an item in C order, in chunks

_SAFETENSORS = {dtype: name for name, (dtype, _) in DTYPES.items()}


def check_safetensors(items: Iterable[ExportTensor]) -> None:
    """Check that safetensors supports the dtype of each item.

    Raises:
        CheckpointError: it does not support one.
    """
    for item in items:
        if item.dtype not in _SAFETENSORS:
            raise CheckpointError(
                f"{item.name}: a safetensors file cannot hold {item.dtype}", fix="export it with --format torch"
            )


def write_safetensors(
    path: Path, items: Sequence[ExportTensor], read_tensor: ReadTensor, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a new safetensors file: the length of the header in 8 bytes, the header as JSON, then the tensors.

    The library's ``save_file`` is not used because it needs all tensors of a file in memory at once.

    Raises:
        OSError: the file cannot be written. An incomplete file is not removed.
    """
    # Widest elements first, so that each tensor starts at a multiple of its element size.
    by_itemsize = sorted(items, key=lambda i: -i.itemsize)
    # Without the format, transformers 4 refuses the file.
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for item in by_itemsize:
        data_offsets = [offset, offset + item.nbytes]
        header[item.name] = {"dtype": _SAFETENSORS[item.dtype], "shape": item.shape, "data_offsets": data_offsets}
        offset += item.nbytes
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    with path.open("xb") as f:
        f.write(len(data).to_bytes(8, "little") + data)
        for item in by_itemsize:
            for chunk in read_tensor(item):
                f.write(chunk)
        f.flush()
        os.fsync(f.fileno())
