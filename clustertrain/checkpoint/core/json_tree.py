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

from clustertrain.checkpoint.format import json_tags
from clustertrain.errors import CheckpointError


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return ``value`` as JSON; add its tensors to ``tensors``, named by their path in the tree, joined by '/'.

    Raises:
        CheckpointError: an object that is neither a tensor nor plain data.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {json_tags.TENSOR: name}
    if isinstance(value, np.generic):  # before float, because np.float64 is a subclass of it
        value = value.item()
    if isinstance(value, (bool, int, float, str)) or value is None:
        return _scalar(value, name)
    if isinstance(value, np.ndarray):
        # As bytes, since torch lacks some of NumPy's dtypes.
        tensors[name] = torch.frombuffer(bytearray(np.ascontiguousarray(value).tobytes()), dtype=torch.uint8)
        return {json_tags.ARRAY: name, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, bytes):
        return {json_tags.BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value) and not json_tags.ALL & value.keys():
            return {k: encode(v, f"{name}/{k}", tensors) for k, v in value.items()}
        pairs = [[encode(k, f"{name}/key", tensors), encode(v, f"{name}/{k}", tensors)] for k, v in value.items()]
        return {json_tags.MAP: pairs}
    if isinstance(value, list):
        return [encode(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {json_tags.TUPLE: [encode(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]}
    raise CheckpointError(
        f"state {name}: a {type(value).__name__} cannot be put in a checkpoint, only tensors and plain data",
        fix="return tensors, numbers, strings, lists and dicts from its state_dict()",
    )


def _scalar(value: bool | int | float | str | None, name: str) -> Any:
    """Return ``value`` as its exact type: JSON does not encode subclasses of numbers."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {json_tags.FLOAT: repr(float(value))}
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else {json_tags.INT: hex(value)}
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
    if json_tags.TENSOR in value:
        return load_tensor(value[json_tags.TENSOR])
    if json_tags.ARRAY in value:
        data = np.frombuffer(load_array(value[json_tags.ARRAY]).numpy().tobytes(), dtype=np.dtype(value["dtype"]))
        return data.reshape(value["shape"]).copy()
    if json_tags.FLOAT in value:
        return float(value[json_tags.FLOAT])
    if json_tags.INT in value:
        return int(value[json_tags.INT], 16)
    if json_tags.BYTES in value:
        return base64.b64decode(value[json_tags.BYTES])
    if json_tags.TUPLE in value:
        return tuple(decode(v, load_tensor, load_array) for v in value[json_tags.TUPLE])
    if json_tags.MAP in value:
        return {decode(k, load_tensor, load_array): decode(v, load_tensor, load_array) for k, v in value[json_tags.MAP]}
    return {k: decode(v, load_tensor, load_array) for k, v in value.items()}


def is_plain_map(value: object) -> bool:
    """Return whether an encoded value is a mapping with string keys, not a tagged value."""
    return isinstance(value, dict) and not json_tags.ALL & value.keys()


def tensor_names(value: object) -> set[str]:
    """Return the names of all tensors that an encoded tree refers to."""
    if isinstance(value, list):
        return set().union(*map(tensor_names, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    for tag in (json_tags.TENSOR, json_tags.ARRAY):
        if tag in value:
            return {value[tag]}
    return set().union(*map(tensor_names, value.values())) if value else set()
