"""Dotted keys, and the types and values that stand at them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import Any, get_args, get_origin

import msgspec

from clustertrain.config import toml_parser
from clustertrain.errors import ConfigError


def struct_of(kind: Any) -> type[msgspec.Struct] | None:
    for candidate in (kind, *get_args(kind)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


def elements_of(kind: Any) -> tuple[Any, ...]:
    """The types in the list that ``kind`` is or may be, ``(type, ...)`` where there may be any number; () if it is
    none."""
    for candidate in (kind, *get_args(kind)):
        if get_origin(candidate) is tuple:
            return get_args(candidate)
        if get_origin(candidate) is list:
            return (*get_args(candidate), ...)
    return ()


def fields_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Their types by name."""
    return {f.encode_name: f.type for f in msgspec.structs.fields(kind)}


def parts_of(path: str) -> list[str]:
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
    parts = []
    while isinstance(table, dict):
        key, table = next(iter(table.items()))
        parts.append(key)
    return parts


def places_of(path: str) -> list[str | int]:
    """``a.b[0].c`` of msgspec as its parts. ``[...]``, which stands for any key, is left out."""
    return [int(place) if place else key for place, key in re.findall(r"\[(\d+)\]|([^.\[\]]+)", path)]


def type_at(kind: Any, parts: Sequence[str | int]) -> Any:
    """None where there is none."""
    for part in parts:
        if isinstance(part, int):
            of = elements_of(kind)
            kind = of[0 if of[1:] == (...,) else part] if of else None
        else:
            struct = struct_of(kind)
            kind = fields_of(struct).get(part) if struct else None
    return kind


def value_at(value: Any, parts: Sequence[str | int]) -> Any:
    """None where a part of the path is no table's."""
    for part in parts:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value
