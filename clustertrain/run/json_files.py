"""Tolerant reading of a run's JSON files.

Data that is damaged or written by another version is left out and reported, so that one file does not hide the rest of
the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import msgspec

from clustertrain import reading, schema

T = TypeVar("T", bound=msgspec.Struct)

MAX_NUMBER = 2.0**63
_TYPE_NAMES = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a bool", type(None): "null"}


class JsonDocument(NamedTuple):
    """The content of a JSON file."""

    value: dict[str, Any]
    error: str | None = None
    """What is wrong with the file, with its name. None also if it is missing or empty: on NFS a reader may be faster
    than a rename."""


def load_document(path: Path, field_types: Mapping[str, type] | None = None) -> JsonDocument:
    """Load the JSON object in ``path``, without the fields whose type differs from that in ``field_types``.

    Raises:
        PermissionError: the user may not read it.
    """
    try:
        text = reading.read_text(path)
        parsed = reading.parse_json(text) if text.strip() else {}
    except FileNotFoundError:
        return JsonDocument({})
    except PermissionError:
        raise
    except OSError as e:
        return JsonDocument({}, f"{path}: {e.strerror or e}")
    except ValueError as e:
        return JsonDocument({}, f"{path}: is not JSON: {e}")
    if not isinstance(parsed, dict):
        return JsonDocument({}, f"{path}: contains {_TYPE_NAMES[type(parsed)]}, not an object")
    invalid_fields = [
        name
        for name, field_type in (field_types or {}).items()
        if name in parsed and not has_type(parsed[name], field_type)
    ]
    value = {k: v for k, v in parsed.items() if k not in invalid_fields}
    return JsonDocument(value, f"{path}: invalid fields: {', '.join(invalid_fields)}" if invalid_fields else None)


def poll_document(path: Path) -> dict[str, Any]:
    """Load a file that another process may be writing; return an empty dict if anything goes wrong."""
    try:
        return load_document(path).value
    except OSError:
        return {}


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a number that is finite and within 64 bits; bools are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def has_type(value: object, field_type: type) -> bool:
    """Return whether ``value`` has the type of a field; ``float`` stands for all numbers."""
    return is_number(value) if field_type is float else isinstance(value, field_type)


def convert_leniently(value: object, struct_type: type[T]) -> T | None:
    """Return ``value`` as a ``struct_type``, without unknown fields and those of a wrong type.

    An integer field may hold 3.0: JSON does not distinguish it from 3, and a script may pass ``total=1e4``. Return None
    if ``value`` is not an object, or a required field is missing or of a wrong type.
    """
    if not isinstance(value, dict):
        return None
    try:
        return schema.convert(value, struct_type)
    except msgspec.ValidationError:
        pass
    fields = [f for f in msgspec.structs.fields(struct_type) if f.encode_name in value]
    candidates = ((f, _to_integer(value[f.encode_name], f)) for f in fields)
    valid = {f.encode_name: candidate for f, candidate in candidates if _is_valid(candidate, f)}
    try:
        return schema.convert(valid, struct_type)
    except msgspec.ValidationError:
        return None


def _is_valid(value: object, field: msgspec.structs.FieldInfo) -> bool:
    try:
        schema.convert(value, field.type)
    except msgspec.ValidationError:
        return False
    return True


def _to_integer(value: object, field: msgspec.structs.FieldInfo) -> object:
    """Return a float without a fraction as an int if the field takes no floats."""
    if isinstance(value, float) and is_number(value) and value.is_integer() and not _is_valid(value, field):
        return int(value)
    return value
