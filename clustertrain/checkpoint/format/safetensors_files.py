"""Safetensors files that somebody else wrote: names, dtypes, shapes and places of the tensors, from the headers.

A file is the length of the header in 8 bytes, the header as JSON, then the tensors. Large models are split into several
files, with an index of the tensors in each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeGuard

from clustertrain import reading
from clustertrain.checkpoint.format.manifest import ShardRecord, TensorRecord
from clustertrain.checkpoint.format.tensor_differences import list_differences
from clustertrain.errors import ConfigError, NotFound

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "C64": ("complex64", 8),
    "BOOL": ("bool", 1),
    **{f"I{8 * n}": (f"int{8 * n}", n) for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": (f"uint{8 * n}", n) for n in (1, 2, 4, 8)},
}
"""Torch's name and the bytes per element of each dtype of safetensors."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_TIED_HEAD = "lm_head.weight"
_FIX = "download the file again"


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a model in the files of a folder."""

    folder: Path
    sizes: Mapping[str, int]
    """Bytes of each file, by its name in the folder."""
    tensors: Mapping[str, TensorRecord]
    """The tensors by name. In safetensors files each has one shard without checksums, since the format has none."""
    metadata: Mapping[str, str]
    """The metadata of the files' headers."""


def read_weight_files(path: Path) -> WeightFiles:
    """Read the headers of the safetensors file ``path``, or of those in the folder ``path``. No tensor is read.

    Raises:
        NotFound: there is no such file, or one that the index names is missing.
        ConfigError: a file is damaged, or two files have a tensor of the same name.
    """
    if path.is_file():
        folder, names = path.parent, [path.name]
    elif path.is_dir():
        folder, names = path, _list_files(path)
    else:
        raise NotFound(f"{path}: no such file or folder", fix="check the path; every node must see it")
    sizes: dict[str, int] = {}
    tensors: dict[str, TensorRecord] = {}
    metadata: dict[str, str] = {}
    for name in names:
        try:
            sizes[name], in_file, of_file = _read_header(folder, name)
        except FileNotFoundError as e:
            raise NotFound(f"{folder / name}: is missing, but {INDEX_FILE} names it", fix="download it too") from e
        except OSError as e:
            raise ConfigError(f"{folder / name}: cannot be read: {e.strerror or e}") from e
        for tensor in in_file:
            if tensor.name in tensors:
                raise ConfigError(f"{folder}: two files contain {tensor.name}", fix="remove the one that is not needed")
            tensors[tensor.name] = tensor
        metadata |= of_file
    return WeightFiles(folder, sizes, tensors, metadata)


def _list_files(folder: Path) -> list[str]:
    if (folder / INDEX_FILE).exists():
        return _read_index(folder / INDEX_FILE)
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(names) == 1:
        return names
    if names:
        raise ConfigError(
            f"{folder}: has {len(names)} safetensors files and no {INDEX_FILE}", fix="add the index, or name one file"
        )
    pickled = next((p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))), "")
    reason = f", only {pickled}, which could run code when it is read" if pickled else ""
    raise NotFound(f"{folder}: contains no safetensors file{reason}", fix="save the model with save_pretrained")


def _read_index(path: Path) -> list[str]:
    """Return the names of the files in an index."""
    try:
        document = reading.read_json(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}", fix=_FIX) from e
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{path}: has no weight_map from tensor names to file names", fix=_FIX)
    names = sorted(set(weight_map.values()))
    for name in names:
        if PurePath(name).name != name or name in ("", ".", ".."):
            raise ConfigError(f"{path}: names {name!r}, which is not a file in its folder", fix=_FIX)
    return names


def _read_header(folder: Path, name: str) -> tuple[int, list[TensorRecord], dict[str, str]]:
    """Return the size of a file, its tensors and its metadata."""
    path = folder / name
    with reading.open_regular(path) as f:
        size = path.stat().st_size
        length = int.from_bytes(f.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise ConfigError(f"{path}: is not a safetensors file, or ends in its header", fix=_FIX)
        data = f.read(length)
    try:
        header = reading.parse_json(data)
    except ValueError as e:
        raise ConfigError(f"{path}: the header is not JSON: {e}", fix=_FIX) from e
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: the header is not an object", fix=_FIX)
    first = _LENGTH_BYTES + length
    tensors = [_parse_entry(path, key, entry, first) for key, entry in header.items() if key != "__metadata__"]
    for tensor in tensors:
        end = tensor.shards[0].offset + tensor.shards[0].nbytes
        if end > size:
            raise ConfigError(f"{path}: is torn: {tensor.name} ends at byte {end}, the file at byte {size}", fix=_FIX)
    metadata = header.get("__metadata__")
    texts = {k: v for k, v in metadata.items() if isinstance(v, str)} if isinstance(metadata, dict) else {}
    return size, tensors, texts


def _parse_entry(path: Path, name: str, entry: Any, first: int) -> TensorRecord:
    """Return the tensor of an entry of the header; ``first`` is the first byte after the header."""

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"{path}: {name}: {reason}", fix=_FIX)

    fields = entry if isinstance(entry, dict) else {}
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    if not _is_list_of_sizes(shape) or not _is_list_of_sizes(offsets) or len(offsets) != 2:
        raise refuse("the header has no shape and two data_offsets")
    if fields.get("dtype") not in DTYPES:
        raise refuse(f"dtype {fields.get('dtype')!r} is unknown")
    dtype, itemsize = DTYPES[fields["dtype"]]
    nbytes = math.prod(shape) * itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise refuse(f"has {offsets[1] - offsets[0]} bytes, but its shape has {nbytes}")
    shard = ShardRecord(
        file=path.name,
        offset=first + offsets[0],
        nbytes=nbytes,
        start=(0,) * len(shape),
        shape=tuple(shape),
        blocks="",
        checksum="",
    )
    return TensorRecord(name=name, kind="model", dtype=dtype, itemsize=itemsize, shape=tuple(shape), shards=(shard,))


def _is_list_of_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def check_tensors(
    files: WeightFiles,
    expected: Mapping[str, tuple[int, ...]],
    source: str,
    *,
    integers: Collection[str] = (),
    ignored: Collection[str] = (),
) -> None:
    """Check that the files contain exactly the tensors ``expected``, shapes by name, in a floating-point dtype.

    Buffers of rotary embeddings, which old files contain, and the copy of a tied embedding are ignored.

    Args:
        source: what expects them, for the message.
        integers: names of tensors that may have any dtype, since the model's are not floating-point either.
        ignored: names of further tensors that the files may contain.

    Raises:
        ConfigError: they do not; the message lists all differences.
    """
    buffers = {name for name in files.tensors if _is_ignored(name, expected)}
    lines = list_differences(files.tensors, expected, integers=integers, ignored=buffers.union(ignored))
    if lines:
        raise ConfigError(
            f"{files.folder}: the tensors are not those of {source}:\n  " + "\n  ".join(lines),
            fix="choose weights of the same model, in a floating-point dtype, or change the model's sizes",
        )


def _is_ignored(name: str, expected: Mapping[str, tuple[int, ...]]) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (name == _TIED_HEAD and _TIED_HEAD not in expected)
