"""Turn a plain mapping (TOML, JSON) into a frozen struct: unknown keys fail and suggest the nearest one."""

from __future__ import annotations

import codecs
import difflib
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from clustertrain import reading, schema
from clustertrain.config import bounds, suggestions, synonyms, toml_parser
from clustertrain.config.dotted_keys import fields_of, parts_of, places_of, struct_of, type_at, value_at
from clustertrain.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)
ENVIRONMENT = "env."  # of a recipe: names of variables stand behind it


def nearest(word: str, known: list[str]) -> str:
    """A sentence that names the nearest known words, or all of them when none is near."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + ", ".join(sorted(known))


def _check_keys(value: dict[str, Any], kind: type[msgspec.Struct], source: str) -> None:
    """Raises ConfigError for the first key that ``kind`` does not have."""

    def look(table: dict[str, Any], of: type[msgspec.Struct], above: str) -> None:
        fields = fields_of(of)
        for key, inner in table.items():
            if key not in fields:
                meant = _meant(key, list(fields), above, known_keys(kind))
                raise ConfigError(f"{source}: unknown key {above + key!r}", fix=meant)
            struct = struct_of(fields[key])
            if struct is not None and isinstance(inner, dict):
                look(inner, struct, f"{above}{key}.")

    look(value, kind, "")


def known_keys(kind: type[msgspec.Struct], above: str = "") -> list[str]:
    """All that may be written, with the tables themselves."""
    found = []
    for name, of in fields_of(kind).items():
        found.append(above + name)
        struct = None if get_origin(of) is tuple else struct_of(of)
        found += known_keys(struct, f"{above}{name}.") if struct is not None else []
    return found


def _meant(key: str, beside: list[str], above: str, known: list[str]) -> str:
    """A sentence that names what ``key`` may stand for.

    Args:
        beside: the keys of its table, ``above``; ``known``: those of all tables.
    """
    leaves = {name: name.rpartition(".")[2] for name in known}
    near = [above + name for name in difflib.get_close_matches(key, beside, n=3, cutoff=0.75)]
    found = near + [name for name, leaf in leaves.items() if leaf == key]
    found = found or [name for name in synonyms.key(key) if name in leaves and f"{name}." != above]
    if not found:
        close = difflib.get_close_matches(key, sorted(set(leaves.values())), n=1, cutoff=0.8)
        found = [name for name, leaf in leaves.items() if leaf in close]
    found = found or [above + name for name in difflib.get_close_matches(key, beside, n=3, cutoff=0.5)]
    if found:
        units = [synonyms.UNITS[name] for name in found if name in synonyms.UNITS]
        return f"did you mean {' or '.join(found)}?" + "".join(f" {unit}" for unit in units)
    return f"known: {', '.join(sorted(beside))}"


def _check_finite(value: Any, where: str, source: str) -> None:
    """TOML has nan and inf, which pass half of all checks of a range."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{source}: {where} = {value}: must be a finite number", fix=f"change {where}")
    inner = value.items() if isinstance(value, dict) else ((None, v) for v in value) if isinstance(value, list) else ()
    for key, of in inner:
        _check_finite(of, where if key is None else f"{where}.{key}" if where else str(key), source)


def build(value: dict[str, Any], kind: type[S], source: str, at: str = "") -> S:
    """``value`` as a ``kind``, whose keys stand below ``at`` in :data:`clustertrain.config.bounds.BOUNDS`.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range; names the key and ``source``.
    """
    _check_keys(value, kind, source)
    _check_finite(value, "", source)
    bounds.check(value, source, at)
    try:
        return schema.convert(value, kind)
    except msgspec.ValidationError as e:
        text, _, path = str(e).partition(" - at `$")
        where = path.rstrip("`").lstrip(".")
        key = _whole(value, kind, where)
        fix = suggestions.of(value, kind, where, text) or suggestions.of(value, kind, key, text) or _show(value, key)
        raise ConfigError(f"{source}: {_named(kind, key, _plain(text))}", fix=fix) from e


def _named(kind: type[msgspec.Struct], key: str, text: str) -> str:
    """``text`` with the key that it is of; what a table says of its own keys begins with the name of one."""
    if not key:
        return text
    struct = struct_of(type_at(kind, places_of(key)))
    begins = re.match(r"(\w+)(?= = |: )", text)
    own = struct is not None and begins is not None and begins[1] in fields_of(struct)
    return f"{key}.{text}" if own else f"{key}: {text}"


def _whole(value: dict[str, Any], kind: type[msgspec.Struct], key: str) -> str:
    """``key`` with the name in place of ``[...]``, which is msgspec's for any key of a table that the user names."""
    above, found, below = key.partition("[...]")
    if not found:
        return key
    of = get_args(type_at(kind, places_of(above)))[-1]
    for name, inner in value_at(value, places_of(above)).items():
        try:
            schema.convert(inner, of)
        except msgspec.ValidationError:
            return f"{above}.{text_of_key(name)}{below}"
    return key


def text_of_key(name: str) -> str:
    """As TOML writes it, in quotes where it has to."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _plain(text: str) -> str:
    text = text.replace("`object`", "a table").replace("`array`", "a list")
    return text[0].lower() + text[1:] if text.startswith(("Expected", "Invalid", "Object")) else text


def _show(value: dict[str, Any], key: str) -> str | None:
    current = value_at(value, places_of(key))
    return f"change {key} = {text_of(current)}" if key and not isinstance(current, dict | None) else None


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError for a missing, unreadable or malformed file."""
    return parse_toml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Raises ConfigError for a missing or unreadable file."""
    try:
        content = reading.read_bytes(path)
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ConfigError(f"{path}: is UTF-16", fix="save it as UTF-8, which is all that TOML may be")
        return content.decode("utf-8-sig").replace("\r\n", "\n")  # editors of Windows begin UTF-8 with a BOM
    except FileNotFoundError as e:
        raise ConfigError(f"{path}: no such file") from e
    except reading.UnusableFile as e:
        raise ConfigError(e.message, fix=e.fix) from e
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}") from e


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Raises ConfigError for what is not TOML; names ``source``."""
    try:
        return toml_parser.loads(text, source)
    except tomllib.TOMLDecodeError as e:
        place = re.search(r"at line (\d+)", str(e))
        line = text.split("\n")[int(place[1]) - 1].strip() if place else ""
        said = f"{source}: not valid TOML: {e}{': ' if line else ''}{line}"
        raise ConfigError(said, fix=suggestions.bare_word(line)) from e


def assigned(assignment: str, option: str = "--set") -> tuple[str, str]:
    """``key.path=value`` as the path and the text of the value."""
    path, sign, text = assignment.partition("=")
    if not sign or not path.strip():
        raise ConfigError(f"{option} {assignment!r}: not of the form key.path=value")
    return path.strip(), text


def value_of(text: str, path: str = "") -> Any:
    """The value of the command line for ``path``: TOML. What is not TOML is a string, and in the environment all is."""
    try:
        value = toml_parser.loads(f"value = {text}", path or "the value")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if path.startswith(ENVIRONMENT) and not isinstance(value, str) else value


def text_of(value: Any) -> str:
    """``value`` as it is written in a recipe. What TOML has no word for, None, is left as Python has it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {text_of(inner)}" for key, inner in value.items()) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text_of, value))}]"
    return str(value) if value is None else json.dumps(value, ensure_ascii=False, default=str)


def set_dotted(document: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at ``key.path`` in place; a part with dots in it is quoted, as in TOML.

    Raises:
        ConfigError: a part of the path is a value; a quote is not closed.
    """
    *folders, leaf = parts_of(path)
    current = document
    for folder in folders:
        inner = current.setdefault(folder, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: {folder} is a value, not a table")
        current = inner
    current[leaf] = value
