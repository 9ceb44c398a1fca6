"""Consistency checks of a manifest, whose checksum alone does not make it trustworthy.

Each function returns a description of the problem, or None.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

MAX_BYTES = 1 << 62  # of a tensor: limit of NumPy and torch
MAX_DIMS = 63  # one less than NumPy's limit: the bytes of an element need one
_ITEMSIZE = {  # bytes per element of torch's dtypes; later versions may have others
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
_TENSOR_TAGS = ("__tensor__", "__array__")  # tags of :mod:`~clustertrain.checkpoint.core.json_tree` that name a tensor

ShardBox = tuple[tuple[int, ...], tuple[int, ...]]  # start and shape


def find_name_error(name: str) -> str | None:
    """Check the name of a file in the checkpoint's folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return "is outside the checkpoint"
    return "is not a valid file name" if not path.parts or "\0" in name else None


def find_form_error(dtype: str, itemsize: int, shape: Sequence[int]) -> str | None:
    """Check dtype, element size and shape of a whole tensor."""
    expected_itemsize = _ITEMSIZE.get(dtype)
    if itemsize < 1 or expected_itemsize not in (None, itemsize):
        return f"has elements of {itemsize} bytes, but {dtype} has {expected_itemsize or 'at least 1'}"
    if len(shape) > MAX_DIMS or min(shape, default=0) < 0 or math.prod(n for n in shape if n) * itemsize > MAX_BYTES:
        return f"has the impossible shape {list(shape)[:MAX_DIMS]}"
    return None


def find_tiling_error(shape: Sequence[int], boxes: Sequence[ShardBox]) -> str | None:
    """Check that ``boxes`` cover each element of a tensor exactly once."""
    if _is_row_tiling(tuple(shape), boxes):
        return None
    for start, size in boxes:
        if not len(start) == len(size) == len(shape):
            return f"has {len(shape)} dimensions, but one of its shards has {len(size)}"
        if any(low < 0 or n < 0 or low + n > extent for low, n, extent in zip(start, size, shape, strict=True)):
            return "has a shard that reaches beyond its shape"
    covered = sum(math.prod(size) for _, size in boxes)
    if covered != math.prod(shape):
        return f"has {math.prod(shape)} elements, but its shards have {covered}"
    return "has shards that overlap" if _has_overlap(boxes) else None


def _is_row_tiling(shape: tuple[int, ...], boxes: Sequence[ShardBox]) -> bool:
    """Return whether the boxes are consecutive slices of rows, the usual case, which is ten times faster to check."""
    next_row, row_shape, row_start = 0, shape[1:], (0,) * len(shape[1:])
    for start, size in sorted(boxes):
        if start[:1] != (next_row,) or start[1:] != row_start or size[1:] != row_shape or not size or size[0] < 0:
            return False
        next_row += size[0]
    return shape[:1] == (next_row,)


def _has_overlap(boxes: Sequence[ShardBox]) -> bool:
    """Return whether two boxes overlap. Sorts them along the dimension with the most cuts, to compare few pairs."""
    non_empty = [box for box in boxes if math.prod(box[1])]
    if len(non_empty) < 2:
        return False
    dims = range(len(non_empty[0][0]))
    if not dims:
        return True
    axis = max(dims, key=lambda d: len({start[d] for start, _ in non_empty}))
    non_empty.sort(key=lambda box: box[0][axis])
    for i, (start, size) in enumerate(non_empty):
        for j in range(i + 1, len(non_empty)):
            other, other_size = non_empty[j]
            if other[axis] >= start[axis] + size[axis]:
                break
            if all(start[d] < other[d] + other_size[d] and other[d] < start[d] + size[d] for d in dims):
                return True
    return False


def find_values_error(values: object, tensors: Collection[str]) -> str | None:
    """Check that the tree of values refers only to existing tensors."""
    stack: list[object] = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            for tag in _TENSOR_TAGS:
                if tag in value and not (isinstance(value[tag], str) and value[tag] in tensors):
                    return f"refers to the tensor {str(value[tag])[:100]!r}, which it does not contain"
            stack += value.values()
    return None
