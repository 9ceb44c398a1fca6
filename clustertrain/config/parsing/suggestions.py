"""Fixes for invalid values of a recipe, derived from the expected type and the value."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import msgspec

from clustertrain.config.parsing import dotted_keys, synonyms, toml_parser
from clustertrain.errors import ConfigError

_BOOL_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("true", "yes", "on", "1"), "true"),
    **dict.fromkeys(("false", "no", "off", "0"), "false"),
}
_NUMBERS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}


# Keys that count steps, and the key for a share or for epochs.
_SHARES: Mapping[str, tuple[str, str]] = {
    "schedule.warmup_steps": ("schedule.warmup_ratio", "a fraction of the steps"),
    "schedule.milestones": ("schedule.milestone_epochs", "epochs"),
    "train.steps": ("train.epochs", "passes over the data"),
}


@dataclass(frozen=True)
class _InvalidValue:
    """An invalid value of a document."""

    key: str
    value: Any
    annotation: Any
    """Type declared for ``key``."""
    expected: tuple[str, ...]
    """Names that msgspec uses for the accepted types."""

    def suggest(self, text: str) -> str:
        """Return the fix that writes ``text`` as the value."""
        # In a list of tables the line has only the last part of the key.
        return f"write {text}" if self.key.endswith("]") else f"write {self.key.rpartition('].')[2]} = {text}"


def suggest_fix(document: dict[str, Any], struct_type: type[msgspec.Struct], key: str, text: str) -> str | None:
    """Return a fix for the value at ``key``, or None if none is known.

    Args:
        document: the whole document, to be converted to ``struct_type``.
        text: the error message of msgspec or of a struct.
    """
    path = dotted_keys.parse_msgspec_path(key)
    match = re.match(r"Expected `([^`]+)`", text)
    expected = tuple(match[1].split(" | ")) if match else ()
    invalid = _InvalidValue(key, dotted_keys.value_at(document, path), dotted_keys.type_at(struct_type, path), expected)
    if key.endswith("[...]"):
        return _suggest_quoted_name(invalid)
    suggestion = _suggest_choice(invalid) or _suggest_range(invalid, text)
    if suggestion or not expected:
        return suggestion
    return (
        _suggest_list(invalid)
        or _suggest_bool(invalid)
        or _suggest_number(invalid)
        or _suggest_string(invalid)
        or _suggest_table(invalid)
    )


def suggest_for_bare_word(line: str) -> str | None:
    """Return a fix for a line of TOML whose value is an unquoted word; None for other lines."""
    match = re.fullmatch(r"[^=#]+=\s*([A-Za-z_/~$][^\"'#\[\]{}]*?)\s*(#.*)?", line)
    if match is None:
        return None
    word = match[1]
    if word.lower() in ("none", "null"):
        return "remove the key: TOML has no null"
    literal = _BOOL_WORDS.get(word.lower())
    return f"write {literal}" if literal else f'strings need quotes: "{word}"'


def _suggest_choice(invalid: _InvalidValue) -> str | None:
    """Suggest the values that the field accepts, nearest first."""
    if get_origin(invalid.annotation) is not Literal:
        return None
    value = str(invalid.value)
    choices = [choice for choice in get_args(invalid.annotation) if choice]
    synonymous = synonyms.find_values(value)
    choices.sort(key=lambda c: (c not in synonymous, -difflib.SequenceMatcher(None, value.lower(), c).ratio()))
    return "use one of " + ", ".join(choices)


def _suggest_range(invalid: _InvalidValue, text: str) -> str | None:
    """Suggest a change of a number that is out of range, or of one of two conflicting numbers."""
    pair_match = re.match(r"(\S+) = \S+ is not less than (\S+) = ", text)
    if pair_match:
        return f"decrease {pair_match[1]} or increase {pair_match[2]}"
    match = re.match(r"(\w+) = \S+: must (be|lie) ", text)
    struct = dotted_keys.find_struct(invalid.annotation)
    field = next((f for f in msgspec.structs.fields(struct) if match and f.name == match[1]), None) if struct else None
    if field is None:
        return None
    key = f"{invalid.key}.{field.name}" if invalid.key else field.name
    has_positive_default = isinstance(field.default, (int, float)) and field.default > 0
    return (
        f"change {key}, or remove it to use the default, {field.default}" if has_positive_default else f"change {key}"
    )


def _suggest_quoted_name(invalid: _InvalidValue) -> str | None:
    """Suggest quotes for a name with dots, which TOML reads as nested tables."""
    tables = [key for key, inner in invalid.value.items() if isinstance(inner, dict)]
    if not tables:
        return None
    keys, inner = [tables[0]], invalid.value[tables[0]]
    while isinstance(inner, dict) and inner:
        keys.append(next(iter(inner)))
        inner = inner[keys[-1]]
    name, text = f"{invalid.key.removesuffix('[...]')}.{json.dumps('.'.join(keys))}", json.dumps(inner, default=str)
    return f"quote the name: {name} = {text}, or in a shell --set '{name}={text}'"


def _suggest_list(invalid: _InvalidValue) -> str | None:
    if "array" not in invalid.expected:
        return None
    element_types = dotted_keys.element_types(invalid.annotation)
    if isinstance(invalid.value, dict):
        is_table_list = bool(element_types) and dotted_keys.find_struct(element_types[0]) is not None
        return (
            f"write [[{invalid.key}]] with two brackets, because it is a list of tables"
            if is_table_list
            else invalid.suggest('["…"]')
        )
    if element_types[1:] == (...,) and not isinstance(invalid.value, list):
        return invalid.suggest(f"[{json.dumps(invalid.value, default=str)}]")
    if element_types and element_types[1:] != (...,):
        values = invalid.value if isinstance(invalid.value, list) else [invalid.value]
        formatted = [json.dumps(item, default=str) for item in values[: len(element_types)]]
        return invalid.suggest(
            f"[{', '.join(formatted + ['…'] * (len(element_types) - len(formatted)))}], a list of {len(element_types)}"
        )
    return None


def _suggest_table(invalid: _InvalidValue) -> str | None:
    struct = dotted_keys.find_struct(invalid.annotation)
    if "object" not in invalid.expected:
        return None
    keys = [f"{invalid.key}.{name}" for name in dotted_keys.field_types(struct)][:3] if struct is not None else []
    return (
        f"set its keys, for example {', '.join(keys)}"
        if keys
        else f"write [{invalid.key}] and below it its keys as NAME = VALUE"
    )


def _suggest_bool(invalid: _InvalidValue) -> str | None:
    literal = _BOOL_WORDS.get(str(invalid.value).lower()) if "bool" in invalid.expected else None
    return invalid.suggest(literal) if literal else None


def _suggest_number(invalid: _InvalidValue) -> str | None:
    number_types = tuple(number_type for name in invalid.expected for number_type in _NUMBERS.get(name, ()))
    value = invalid.value
    if not number_types:
        return None
    if isinstance(value, float):
        if value.is_integer():
            return invalid.suggest(str(int(value)))
        other = _SHARES.get(invalid.key.partition("[")[0])
        fraction = f", or {other[0]} for {other[1]}" if other else ""
        return f"write an integer{fraction}" + (
            ": it is a count, not a fraction" if 0 < value < 1 and not other else ""
        )
    try:
        parsed = toml_parser.loads(f"value = {value}", invalid.key)["value"] if isinstance(value, str) else None
    except (tomllib.TOMLDecodeError, ConfigError):
        return None
    return f"{invalid.suggest(value)}, without the quotes" if type(parsed) in number_types else None


def _suggest_string(invalid: _InvalidValue) -> str | None:
    needs_quotes = "str" in invalid.expected and isinstance(invalid.value, (bool, int, float))
    return f"{invalid.suggest(json.dumps(json.dumps(invalid.value)))}, with the quotes" if needs_quotes else None
