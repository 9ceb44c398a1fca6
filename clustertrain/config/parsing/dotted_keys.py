"""Dotted keys, and the types and values that stand at them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import Any, get_args, get_origin

import msgspec

from clustertrain.config.parsing import toml_parser
from clustertrain.errors import ConfigError


def find_struct(annotation: Any) -> type[msgspec.Struct] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


def element_types(annotation: Any) -> tuple[Any, ...]:
    """The types in the list that ``annotation`` is or may be, ``(type, ...)`` where there may be any number; () if it
    is none."""
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) is tuple:
            return get_args(candidate)
        if get_origin(candidate) is list:
            return (*get_args(candidate), ...)
    return ()


def field_types(struct_type: type[msgspec.Struct]) -> dict[str, Any]:
    """Their types by name."""
    return {f.encode_name: f.type for f in msgspec.structs.fields(struct_type)}


def split_key(path: str) -> list[str]:
    """``a."b.c".d`` as its three parts. Without quotes they need not be TOML's: ``layer*`` can stay as it is.

    Raises:
        ConfigError: a quote without its other half.
    """
    if '"' not in path and "'" not in path:
        return path.split(".")
    try:
        table: Any = toml_parser.loads(f"{path} = 0", path)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path}: not a key in TOML", fix='quote the part with dots in it, as table."a.b"') from e
    keys = []
    while isinstance(table, dict):
        key, table = next(iter(table.items()))
        keys.append(key)
    return keys


def parse_msgspec_path(path: str) -> list[str | int]:
    """``a.b[0].c`` of msgspec as its parts. ``[...]``, which stands for any key, is left out."""
    return [int(index) if index else key for index, key in re.findall(r"\[(\d+)\]|([^.\[\]]+)", path)]


def type_at(annotation: Any, path: Sequence[str | int]) -> Any:
    """None where there is none."""
    for key in path:
        if isinstance(key, int):
            elements = element_types(annotation)
            annotation = elements[0 if elements[1:] == (...,) else key] if elements else None
        else:
            struct = find_struct(annotation)
            annotation = field_types(struct).get(key) if struct else None
    return annotation


def value_at(value: Any, path: Sequence[str | int]) -> Any:
    """None where a part of the path is no table's."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value
