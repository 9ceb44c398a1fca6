"""Turn a plain mapping (TOML, JSON) into a frozen struct: unknown keys fail and suggest the nearest one."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from clustertrain.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)


def nearest(word: str, known: list[str]) -> str:
    """A sentence that names the nearest known words, or all of them when none is near."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + ", ".join(sorted(known))


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    for candidate in (kind, *get_args(kind)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


def _check_keys(value: dict[str, Any], kind: type[msgspec.Struct], where: str, source: str) -> None:
    fields = {f.encode_name: f.type for f in msgspec.structs.fields(kind)}
    for key, inner in value.items():
        path = f"{where}.{key}" if where else key
        if key not in fields:
            raise ConfigError(f"{source}: unknown key {path!r}", fix=nearest(key, list(fields)))
        struct = _struct_of(fields[key])
        if struct is not None and isinstance(inner, dict):
            _check_keys(inner, struct, path, source)


def _check_finite(value: Any, where: str, source: str) -> None:
    """TOML has nan and inf, which pass half of all checks of a range."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{source}: {where} = {value}: must be a finite number", fix=f"change {where}")
    inner = value.items() if isinstance(value, dict) else ((None, v) for v in value) if isinstance(value, list) else ()
    for key, of in inner:
        _check_finite(of, where if key is None else f"{where}.{key}" if where else str(key), source)


def build(value: dict[str, Any], kind: type[S], source: str) -> S:
    """``value`` as a ``kind``.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range; names the key and ``source``.
    """
    _check_keys(value, kind, "", source)
    _check_finite(value, "", source)
    try:
        return msgspec.convert(value, type=kind, strict=True)
    except msgspec.ValidationError as e:
        text, _, path = str(e).partition(" - at `$")
        key = path.rstrip("`").lstrip(".")
        fix = _one_of(value, kind, key) or _as_list(value, text, key) or _show(value, key)
        raise ConfigError(f"{source}: {key or 'top level'}: {_plain(text)}", fix=fix) from e


def _plain(text: str) -> str:
    return text[0].lower() + text[1:] if text.startswith(("Expected", "Invalid", "Object")) else text


def _at(value: dict[str, Any], key: str) -> Any:
    """The value at ``key``; None where a part of the path is no table's."""
    current: Any = value
    for part in key.split(".") if key else []:
        if not isinstance(current, dict) or part not in current:
            return None
        current = current[part]
    return current


def _one_of(value: dict[str, Any], kind: type[msgspec.Struct], key: str) -> str | None:
    """The words that the field at ``key`` takes, the nearest ones first; None where it takes other things."""
    field: Any = kind
    place = re.search(r"\[(\d+)\]$", key)  # of a list
    key = key[: place.start()] if place else key
    for part in key.split("."):
        struct = _struct_of(field)
        fields = {f.encode_name: f.type for f in msgspec.structs.fields(struct)} if struct else {}
        field = fields.get(part)
    given = _at(value, key)
    if place and get_args(field) and isinstance(given, list):
        field, given = get_args(field)[0], given[int(place[1])]
    if get_origin(field) is not Literal:
        return None
    words = sorted(
        (word for word in get_args(field) if word),
        key=lambda word: -difflib.SequenceMatcher(None, str(given), word).ratio(),
    )
    return "use one of " + ", ".join(words)


def _as_list(value: dict[str, Any], text: str, key: str) -> str | None:
    given = _at(value, key)
    if not text.startswith("Expected `array`") or not isinstance(given, str):
        return None
    return f'write {key} = ["{given}"]'


def _show(value: dict[str, Any], key: str) -> str | None:
    current = _at(value, key)
    if current is None:
        return None
    return f"change {key} = {current!r}" if key and not isinstance(current, dict) else None


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError for a missing, unreadable or malformed file."""
    return parse_toml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Raises ConfigError for a missing or unreadable file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise ConfigError(f"{path}: no such file") from e
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}") from e


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Raises ConfigError for what is not TOML; names ``source``."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{source}: not valid TOML: {e}") from e


def assigned(assignment: str, option: str = "--set") -> tuple[str, str]:
    """``key.path=value`` as the path and the text of the value."""
    path, sign, text = assignment.partition("=")
    if not sign or not path.strip():
        raise ConfigError(f"{option} {assignment!r}: not of the form key.path=value")
    return path.strip(), text


def value_of(text: str) -> Any:
    """A value of the command line: TOML; what is not TOML is taken as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def set_dotted(document: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at ``key.path`` in place. Raises ConfigError where a part of the path is a value."""
    *folders, leaf = path.split(".")
    current = document
    for folder in folders:
        inner = current.setdefault(folder, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: {folder} is a value, not a table")
        current = inner
    current[leaf] = value
