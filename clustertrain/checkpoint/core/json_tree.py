"""Nested state as JSON plus tensors: a tensor becomes ``{"__tensor__": NAME}``, and types that JSON lacks have tags.

Nothing is pickled: an object that is not a tensor, an array or plain data is refused, with its path in the tree.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from clustertrain.errors import CheckpointError

_TENSOR, _ARRAY, _TUPLE, _MAP, _BYTES = "__tensor__", "__array__", "__tuple__", "__map__", "__bytes__"
_FLOAT, _INT = "__float__", "__int__"  # inf, -inf, nan; more than 64 bits
_TAGS = frozenset({_TENSOR, _ARRAY, _TUPLE, _MAP, _BYTES, _FLOAT, _INT})


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return ``value`` as JSON; add its tensors to ``tensors``, named by their path in the tree, joined by '/'.

    Raises:
        CheckpointError: an object that is neither a tensor nor plain data.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, np.generic):  # before float, because np.float64 is a subclass of it
        value = value.item()
    if isinstance(value, (bool, int, float, str)) or value is None:
        return _scalar(value, name)
    if isinstance(value, np.ndarray):
        # As bytes, since torch lacks some of NumPy's dtypes.
        tensors[name] = torch.frombuffer(bytearray(np.ascontiguousarray(value).tobytes()), dtype=torch.uint8)
        return {_ARRAY: name, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value) and not _TAGS & value.keys():
            return {k: encode(v, f"{name}/{k}", tensors) for k, v in value.items()}
        pairs = [[encode(k, f"{name}/key", tensors), encode(v, f"{name}/{k}", tensors)] for k, v in value.items()]
        return {_MAP: pairs}
    if isinstance(value, list):
        return [encode(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [encode(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]}
    raise CheckpointError(
        f"state {name}: a {type(value).__name__} cannot be put in a checkpoint, only tensors and plain data",
        fix="return tensors, numbers, strings, lists and dicts from its state_dict()",
    )


def _scalar(value: bool | int | float | str | None, name: str) -> Any:
    """Return ``value`` as its exact type: JSON does not encode subclasses of numbers."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else {_INT: hex(value)}
    try:
        str.encode(value)
    except UnicodeEncodeError as e:
        raise CheckpointError(
            f"state {name}: the text {value!r} is not valid Unicode: {e.reason}", fix="save it as bytes"
        ) from e
    return str.__str__(value)


def decode(
    value: Any, load_tensor: Callable[[str], torch.Tensor], load_array: Callable[[str], torch.Tensor] | None = None
) -> Any:
    """Reverse :func:`encode`.

    Args:
        load_tensor: returns a tensor by its name.
        load_array: returns the bytes of an array, which must be complete on return. None: ``load_tensor``.
    """
    load_array = load_array or load_tensor
    if isinstance(value, list):
        return [decode(v, load_tensor, load_array) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return load_tensor(value[_TENSOR])
    if _ARRAY in value:
        data = np.frombuffer(load_array(value[_ARRAY]).numpy().tobytes(), dtype=np.dtype(value["dtype"]))
        return data.reshape(value["shape"]).copy()
    if _FLOAT in value:
        return float(value[_FLOAT])
    if _INT in value:
        return int(value[_INT], 16)
    if _BYTES in value:
        return base64.b64decode(value[_BYTES])
    if _TUPLE in value:
        return tuple(decode(v, load_tensor, load_array) for v in value[_TUPLE])
    if _MAP in value:
        return {decode(k, load_tensor, load_array): decode(v, load_tensor, load_array) for k, v in value[_MAP]}
    return {k: decode(v, load_tensor, load_array) for k, v in value.items()}


def is_plain_map(value: object) -> bool:
    """Return whether an encoded value is a mapping with string keys, not a tagged value."""
    return isinstance(value, dict) and not _TAGS & value.keys()


def tensor_names(value: object) -> set[str]:
    """Return the names of all tensors that an encoded tree refers to."""
    if isinstance(value, list):
        return set().union(*map(tensor_names, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    for tag in (_TENSOR, _ARRAY):
        if tag in value:
            return {value[tag]}
    return set().union(*map(tensor_names, value.values())) if value else set()
