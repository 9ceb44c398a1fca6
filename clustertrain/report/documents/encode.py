"""A typed value as the JSON document of a command.

The document begins with ``schema_version``. Points in time, which the structs call ``t``, ``start`` or ``end``, have
their unit in the key, as durations and sizes do. Measured and derived figures have at most nine significant digits,
which is all that a float32 has; settings, whose type is a table of the configuration or ``Any``, stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from clustertrain.report.documents.registry import find_document

SCHEMA_VERSION = "schema_version"
TIME_KEYS: Mapping[str, str] = {
    "t": "time_unix_s",
    "start": "start_unix_s",
    "end": "end_unix_s",
    "submitted": "submitted_unix_s",
    "checkpoint_t": "checkpoint_unix_s",
    "start_estimate": "start_estimate_unix_s",
    "allocation_end": "allocation_end_unix_s",
}
"""Key in a document of each field that is a point in time (UTC epoch s)."""
SIGNIFICANT_DIGITS = 9
TIME_DECIMALS = 3  # ms: no clock of a cluster is better synchronized


class _Field(NamedTuple):
    name: str
    key: str
    is_time: bool
    is_setting: bool


def to_document(name: str, value: Any) -> dict[str, Any]:
    """Return ``value``, a struct, as the document ``name``: builtins, with ``schema_version`` first."""
    return {SCHEMA_VERSION: find_document(name).version, **_encode(value)}


def is_time(field_name: str, field_type: Any) -> bool:
    """Return whether a field of a struct is a point in time, whose key in the document is in :data:`TIME_KEYS`."""
    return field_name in TIME_KEYS and float in (field_type, *typing.get_args(field_type))


@functools.cache
def _fields(struct: Any) -> tuple[_Field, ...]:
    types = typing.get_type_hints(struct)
    if dataclasses.is_dataclass(struct):
        names = [(f.name, f.name) for f in dataclasses.fields(struct)]
    else:
        names = [(f.name, f.encode_name) for f in msgspec.structs.fields(struct)]
    return tuple(
        _Field(name, TIME_KEYS[name] if is_time(name, types[name]) else key, is_time(name, types[name]),
               _is_any(types[name]))
        for name, key in names
    )  # fmt: skip


def _is_any(annotation: Any) -> bool:
    return annotation is Any or any(_is_any(arg) for arg in typing.get_args(annotation))


def _encode(value: Any) -> Any:
    if isinstance(value, float):
        return round_figure(value)
    if isinstance(value, Mapping):
        return {key: _encode(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return [_encode(inner) for inner in value]
    if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
        if type(value).__module__.startswith("clustertrain.config."):
            return msgspec.to_builtins(value)
        struct: Any = type(value)
        return {field.key: _encode_field(field, getattr(value, field.name)) for field in _fields(struct)}
    return msgspec.to_builtins(value)


def _encode_field(field: _Field, value: Any) -> Any:
    if field.is_time and isinstance(value, float):
        return round(value, TIME_DECIMALS)
    return msgspec.to_builtins(value) if field.is_setting else _encode(value)


def round_figure(value: float) -> float:
    """Return ``value`` with nine significant digits; a whole number, such as a count of bytes, stays exact."""
    if not math.isfinite(value) or value.is_integer():
        return value
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
