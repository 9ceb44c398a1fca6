"""Writer of files for ``torch.load(path, weights_only=True)`` that holds one tensor in memory at a time.

``torch.save`` needs all tensors in memory. Its file is an uncompressed zip archive: ``data.pkl``, a pickle in which
storages are references, and the bytes of each storage as ``data/<n>``, aligned to 64 bytes for memory mapping.
"""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from clustertrain.checkpoint.offline.safetensors import ExportTensor, ReadTensor

_ALIGNMENT = 64
_LOCAL_HEADER = 30  # bytes before the name
_ZIP64 = 20  # bytes of the extra field with the sizes, which zipfile appends to the padding
_PADDING = 0x4246  # the ID that torch gives to its padding field


class _Storage:
    def __init__(self, key: int, nbytes: int) -> None:
        self.reference = ("storage", torch.UntypedStorage, str(key), "cpu", nbytes)


class _Tensor:
    def __init__(self, key: int, item: ExportTensor) -> None:
        self._key = key
        self._item = item

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        shape = self._item.shape
        strides = tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))
        storage = _Storage(self._key, self._item.nbytes)
        no_hooks: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        arguments = (storage, 0, shape, strides, False, no_hooks, getattr(torch, self._item.dtype))
        return torch._utils._rebuild_tensor_v3, arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.reference if isinstance(obj, _Storage) else None


def write_torch(path: Path, items: Sequence[ExportTensor], read_tensor: ReadTensor) -> None:
    """Write a new file that contains a dict of tensors by name.

    Raises:
        OSError: the file cannot be written. An incomplete file is not removed.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump({item.name: _Tensor(i, item) for i, item in enumerate(items)})
    with path.open("xb") as f:
        with zipfile.ZipFile(f, "w") as archive:
            _write(archive, "data.pkl", [buffer.getbuffer()])
            _write(archive, "byteorder", [memoryview(b"little")])
            for i, item in enumerate(items):
                _write(archive, f"data/{i}", read_tensor(item))
            _write(archive, "version", [memoryview(b"3\n")])
        f.flush()
        os.fsync(f.fileno())


def _write(archive: zipfile.ZipFile, name: str, chunks: Iterable[memoryview]) -> None:
    info = zipfile.ZipInfo(f"archive/{name}")
    assert archive.fp is not None
    data_offset = archive.fp.tell() + _LOCAL_HEADER + len(info.filename) + 4 + _ZIP64
    padding = -data_offset % _ALIGNMENT
    info.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
    # Always zip64, because the size of the chunks is not known yet.
    with archive.open(info, "w", force_zip64=True) as member:
        for chunk in chunks:
            member.write(chunk)
