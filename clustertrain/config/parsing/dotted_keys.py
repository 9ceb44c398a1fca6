"""Dotted keys, and the types and values that they refer to."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

import msgspec

from clustertrain.config.parsing import toml_parser
from clustertrain.errors import ConfigError


def find_struct(annotation: Any) -> type[msgspec.Struct] | None:
    """Return the struct that ``annotation`` is or contains; None if there is no such struct."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


def element_types(annotation: Any) -> tuple[Any, ...]:
    """Return the element types of the list that ``annotation`` is or may be.

    ``(type, ...)`` for a list of any length, () if it is not a list.
    """
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) is tuple:
            return get_args(candidate)
        if get_origin(candidate) is list:
            return (*get_args(candidate), ...)
    return ()


@functools.cache  # evaluating a class's annotations takes longer than parsing a recipe
def field_types(struct_type: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return the types of the fields by TOML key."""
    return {f.encode_name: f.type for f in msgspec.structs.fields(struct_type)}


def split_key(path: str) -> list[str]:
    """Split ``a."b.c".d`` into its three parts. Unquoted parts need not be TOML keys, for example ``layer*``.

    Raises:
        ConfigError: a quote is not closed.
    """
    if '"' not in path and "'" not in path:
        return path.split(".")
    try:
        table: Any = toml_parser.loads(f"{path} = 0", path)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path}: not a TOML key", fix='quote the part that contains dots, as in table."a.b"') from e
    keys = []
    while isinstance(table, dict):
        key, table = next(iter(table.items()))
        keys.append(key)
    return keys


def parse_msgspec_path(path: str) -> list[str | int]:
    """Split msgspec's ``a.b[0].c`` into its parts, without ``[...]``, its placeholder for any key."""
    return [int(index) if index else key for index, key in re.findall(r"\[(\d+)\]|([^.\[\]]+)", path)]


def type_at(annotation: Any, path: Sequence[str | int]) -> Any:
    """Return the type at ``path`` in ``annotation``; None if the path does not exist."""
    for key in path:
        if isinstance(key, int):
            elements = element_types(annotation)
            annotation = elements[0 if elements[1:] == (...,) else key] if elements else None
        else:
            struct = find_struct(annotation)
            annotation = field_types(struct).get(key) if struct else None
    return annotation


def value_at(value: Any, path: Sequence[str | int]) -> Any:
    """Return the value at ``path`` in ``value``; None if the path does not exist."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value
