"""Files of tensors that other programs read, written one tensor at a time: what is in memory is one of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertrain.checkpoint.format.manifest import TensorRecord
from clustertrain.errors import CheckpointError


@dataclass(frozen=True)
class ExportTensor:
    """A tensor of the export: its name, dtype and bytes of an element there, and what it is made from."""

    name: str
    dtype: str
    itemsize: int
    record: TensorRecord

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


ReadTensor = Callable[[ExportTensor], Iterable[memoryview]]  # the bytes of an item in C order, piece by piece

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "bool": "BOOL",
    **{f"int{n}": f"I{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"U{n}" for n in (8, 16, 32, 64)},
}


def check_safetensors(items: Iterable[ExportTensor]) -> None:
    """Raises CheckpointError for a dtype that the format lacks."""
    for item in items:
        if item.dtype not in _SAFETENSORS:
            raise CheckpointError(
                f"{item.name}: a safetensors file cannot hold {item.dtype}", fix="export it with --format torch"
            )


def write_safetensors(path: Path, items: Sequence[ExportTensor], read_tensor: ReadTensor) -> None:
    """A new safetensors file: the length of the header as 8 bytes, the header as JSON, the tensors one after another.

    By hand and not with the library, whose ``save_file`` wants all tensors of a file in memory at once.

    Raises:
        OSError: it cannot be written; what is there of it is not taken away.
    """
    # The widest first, so that each lies at a multiple of its element's size.
    by_itemsize = sorted(items, key=lambda i: -i.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # without it transformers 4 refuses the file
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
