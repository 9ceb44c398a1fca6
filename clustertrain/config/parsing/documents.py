"""Reading of TOML documents into frozen structs. An unknown key fails, and the error suggests the nearest one."""

from __future__ import annotations

import codecs
import difflib
import json
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from clustertrain import reading, schema
from clustertrain.config.checks.invalid_value import find_fix
from clustertrain.config.parsing import bounds, suggestions, synonyms, toml_parser
from clustertrain.config.parsing.dotted_keys import (
    field_types,
    find_struct,
    parse_msgspec_path,
    split_key,
    type_at,
    value_at,
)
from clustertrain.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)
ENV_PREFIX = "env."  # of keys that are names of environment variables


def find_near(name: str, candidates: Sequence[str]) -> list[str]:
    """Return up to three candidates that resemble ``name`` or begin with it, the nearest first."""
    similar = difflib.get_close_matches(name, candidates, n=3, cutoff=0.6)
    longer = sorted((c for c in candidates if name and c.startswith(name)), key=len)
    return list(dict.fromkeys([*similar, *longer]))[:3]


def did_you_mean(name: str, candidates: list[str], *, otherwise: list[str] | None = None) -> str:
    """Return a sentence that lists the candidates near ``name``.

    If none is near, the sentence lists ``otherwise``, or all candidates without it.
    """
    near = find_near(name, candidates)
    if near:
        return "did you mean " + " or ".join(near) + "?"
    return "known: " + ", ".join(sorted(otherwise or candidates))


def _check_keys(value: dict[str, Any], struct_type: type[msgspec.Struct], source: str) -> None:
    """Raise ConfigError for the first key that ``struct_type`` does not have."""

    def check_table(table: dict[str, Any], table_type: type[msgspec.Struct], prefix: str) -> None:
        fields = field_types(table_type)
        for key, inner in table.items():
            if key not in fields:
                suggestion = suggest_key(key, list(fields), prefix, list_keys(struct_type))
                raise ConfigError(f"{source}: unknown key {prefix + key!r}", fix=suggestion)
            struct = find_struct(fields[key])
            if struct is not None and isinstance(inner, dict):
                check_table(inner, struct, f"{prefix}{key}.")

    check_table(value, struct_type, "")


def list_keys(struct_type: type[msgspec.Struct], prefix: str = "") -> list[str]:
    """Return all dotted keys of ``struct_type``, including those of the tables themselves."""
    keys = []
    for name, annotation in field_types(struct_type).items():
        keys.append(prefix + name)
        struct = None if get_origin(annotation) is tuple else find_struct(annotation)
        keys += list_keys(struct, f"{prefix}{name}.") if struct is not None else []
    return keys


def suggest_key(key: str, siblings: list[str], prefix: str, all_keys: list[str]) -> str:
    """Return a sentence that lists what ``key`` may mean.

    Args:
        siblings: keys of its table.
        prefix: dotted name of the table with a dot at the end; empty for the document itself.
        all_keys: dotted keys of all tables.
    """
    leaves = {name: name.rpartition(".")[2] for name in all_keys}
    similar = [prefix + name for name in difflib.get_close_matches(key, siblings, n=3, cutoff=0.75)]
    candidates = similar + [name for name, leaf in leaves.items() if leaf == key]
    candidates = candidates or [name for name in synonyms.find_keys(key) if name in leaves and f"{name}." != prefix]
    if not candidates:
        close = difflib.get_close_matches(key, sorted(set(leaves.values())), n=1, cutoff=0.8)
        candidates = [name for name, leaf in leaves.items() if leaf in close]
    candidates = candidates or [prefix + name for name in find_near(key, siblings)]
    if candidates:
        units = [synonyms.UNIT_NOTES[name] for name in candidates if name in synonyms.UNIT_NOTES]
        return f"did you mean {' or '.join(candidates)}?" + "".join(f" {unit}" for unit in units)
    return f"known: {', '.join(sorted(siblings))}"


def _check_finite(value: Any, path: str, source: str) -> None:
    """Raise ConfigError for NaN or Inf, which TOML allows and which pass many range checks."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{source}: {path} = {value}: must be a finite number", fix=f"change {path}")
    children = (
        value.items() if isinstance(value, dict) else ((None, v) for v in value) if isinstance(value, list) else ()
    )
    for key, child in children:
        _check_finite(child, path if key is None else f"{path}.{key}" if path else str(key), source)


def build(value: dict[str, Any], struct_type: type[S], source: str, prefix: str = "") -> S:
    """Return ``value`` as a ``struct_type``.

    Args:
        prefix: prefix of its keys in :data:`clustertrain.config.parsing.bounds.BOUNDS`.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is out of range; the message has the key and
            ``source``.
    """
    _check_keys(value, struct_type, source)
    _check_finite(value, "", source)
    bounds.check_bounds(value, source, prefix)
    try:
        return schema.convert(value, struct_type)
    except msgspec.ValidationError as e:
        text, _, path = str(e).partition(" - at `$")
        location = path.rstrip("`").lstrip(".")
        key = _resolve_wildcard(value, struct_type, location)
        fix = (
            find_fix(e.__cause__)
            or suggestions.suggest_fix(value, struct_type, location, text)
            or suggestions.suggest_fix(value, struct_type, key, text)
            or _suggest_change(value, key)
        )
        raise ConfigError(f"{source}: {_prefix_with_key(struct_type, key, _simplify_message(text))}", fix=fix) from e


def _prefix_with_key(struct_type: type[msgspec.Struct], key: str, text: str) -> str:
    """Return ``text`` with the dotted key in front. A table's message about one of its keys starts with its name."""
    if not key:
        return text
    struct = find_struct(type_at(struct_type, parse_msgspec_path(key)))
    match = re.match(r"(\w+)(?= = |: )", text)
    is_own_key = struct is not None and match is not None and match[1] in field_types(struct)
    return f"{key}.{text}" if is_own_key else f"{key}: {text}"


def _resolve_wildcard(value: dict[str, Any], struct_type: type[msgspec.Struct], key: str) -> str:
    """Return ``key`` with the user's key in place of ``[...]``, msgspec's placeholder for it."""
    prefix, wildcard, suffix = key.partition("[...]")
    if not wildcard:
        return key
    value_type = get_args(type_at(struct_type, parse_msgspec_path(prefix)))[-1]
    for name, inner in value_at(value, parse_msgspec_path(prefix)).items():
        try:
            schema.convert(inner, value_type)
        except msgspec.ValidationError:
            return f"{prefix}.{format_key(name)}{suffix}"
    return key


def format_key(name: str) -> str:
    """Return ``name`` as a TOML key, quoted if necessary."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _simplify_message(text: str) -> str:
    text = text.replace("`object`", "a table").replace("`array`", "a list")
    return text[0].lower() + text[1:] if text.startswith(("Expected", "Invalid", "Object")) else text


def _suggest_change(value: dict[str, Any], key: str) -> str | None:
    current = value_at(value, parse_msgspec_path(key))
    return f"change {key} = {format_value(current)}" if key and not isinstance(current, dict | None) else None


def load_toml(path: Path) -> dict[str, Any]:
    """Load a TOML file. Raise ConfigError if it is missing, unreadable or malformed."""
    return parse_toml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Read a UTF-8 file. Raise ConfigError if it is missing or unreadable."""
    try:
        content = reading.read_bytes(path)
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ConfigError(f"{path}: is UTF-16", fix="save it as UTF-8, as TOML requires")
        return content.decode("utf-8-sig").replace("\r\n", "\n")  # editors on Windows start UTF-8 with a BOM
    except FileNotFoundError as e:
        raise ConfigError(f"{path}: no such file") from e
    except reading.UnusableFile as e:
        raise ConfigError(e.message, fix=e.fix) from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not a text file: {e}", fix="save it as UTF-8, as TOML requires") from e
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}", fix="make it readable, or name another file") from e


MAX_SHOWN_LINE = 200  # characters of a wrong line


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML. Raise ConfigError, which has ``source``, if ``text`` is not TOML."""
    try:
        return toml_parser.loads(text, source)
    except tomllib.TOMLDecodeError as e:
        match = re.search(r"at line (\d+)", str(e))
        line = text.split("\n")[int(match[1]) - 1].strip()[:MAX_SHOWN_LINE] if match else ""
        message = f"{source}: not valid TOML: {e}{': ' if line else ''}{line}"
        raise ConfigError(message, fix=suggestions.suggest_for_bare_word(line)) from e


def parse_assignment(assignment: str, option: str = "--set") -> tuple[str, str]:
    """Split ``key.path=value`` into the path and the text of the value."""
    path, separator, text = assignment.partition("=")
    if not separator or not path.strip():
        example = "train.steps=100,200" if option == "--grid" else "train.steps=100"
        raise ConfigError(
            f"{option} {assignment!r}: not of the form key.path=value", fix=f"for example {option} {example}"
        )
    return path.strip(), text


def parse_value(text: str, path: str = "") -> Any:
    """Parse a value of the command line for the key ``path`` as TOML.

    Text that is not TOML is a string, and so is every value of an environment variable.
    """
    try:
        value = toml_parser.loads(f"value = {text}", path or "the value")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if path.startswith(ENV_PREFIX) and not isinstance(value, str) else value


def format_value(value: Any) -> str:
    """Return ``value`` as TOML; None, which TOML lacks, as Python writes it."""
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{key} = {format_value(inner)}" for key, inner in value.items()) + " }" if value else "{}"
        )
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    return str(value) if value is None else json.dumps(value, ensure_ascii=False, default=str)


def set_value_at(document: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at ``key.path`` in place; a part that contains dots must be quoted, as in TOML.

    Raises:
        ConfigError: a part of the path is a value, or a quote is not closed.
    """
    *tables, leaf = split_key(path)
    current = document
    for table in tables:
        inner = current.setdefault(table, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: {table} is a value, not a table", fix=f"set {table} or {path}, not both")
        current = inner
    current[leaf] = value
