"""What to write instead of a value that a recipe cannot have, as far as its type and the value tell."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import msgspec

from clustertrain.config import dotted_keys, synonyms, toml_parser
from clustertrain.errors import ConfigError

_TRUTH: Mapping[str, str] = {
    **dict.fromkeys(("true", "yes", "on", "1"), "true"),
    **dict.fromkeys(("false", "no", "off", "0"), "false"),
}
_NUMBERS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}


@dataclass(frozen=True)
class _Wrong:
    """``kind`` is the type at ``key``; ``expected`` are msgspec's words for what may stand there."""

    key: str
    given: Any
    kind: Any
    expected: tuple[str, ...]

    def write(self, text: str) -> str:
        """``text`` as the value; of a list's tables the recipe's line has only the last part of the key."""
        return f"write {text}" if self.key.endswith("]") else f"write {self.key.rpartition('].')[2]} = {text}"


def of(value: dict[str, Any], kind: type[msgspec.Struct], key: str, text: str) -> str | None:
    """What to do about ``text``, which msgspec or a struct says of the value at ``key``; None where that is not known.

    Args:
        value: the whole document, which is to be a ``kind``.
    """
    places = dotted_keys.places_of(key)
    words = re.match(r"Expected `([^`]+)`", text)
    expected = tuple(words[1].split(" | ")) if words else ()
    wrong = _Wrong(key, dotted_keys.value_at(value, places), dotted_keys.type_at(kind, places), expected)
    if key.endswith("[...]"):
        return _quoted(wrong)
    found = _one_of(wrong) or _range(wrong, text)
    if found or not expected:
        return found
    return _listed(wrong) or _true_or_false(wrong) or _number(wrong) or _string(wrong) or _table(wrong)


def bare_word(line: str) -> str | None:
    """What to do about a line of TOML whose value is a word without quotes; None for other lines."""
    found = re.fullmatch(r"[^=#]+=\s*([A-Za-z_/~$][^\"'#\[\]{}]*?)\s*(#.*)?", line)
    if found is None:
        return None
    word = found[1]
    if word.lower() in ("none", "null"):
        return "leave the key out: TOML has no word for none"
    truth = _TRUTH.get(word.lower())
    return f"write {truth}" if truth else f'strings need quotes: "{word}"'


def _one_of(wrong: _Wrong) -> str | None:
    """The words that the field takes, the nearest ones first."""
    if get_origin(wrong.kind) is not Literal:
        return None
    given = str(wrong.given)
    words = [word for word in get_args(wrong.kind) if word]
    same = synonyms.word(given)
    words.sort(key=lambda word: (word not in same, -difflib.SequenceMatcher(None, given.lower(), word).ratio()))
    return "use one of " + ", ".join(words)


def _range(wrong: _Wrong, text: str) -> str | None:
    """For what a table says of one of its own numbers, or the recipe of two."""
    two = re.match(r"(\S+) = \S+ is not less than (\S+) = ", text)
    if two:
        return f"make {two[1]} less, or {two[2]} more"
    one = re.match(r"(\w+) = \S+: must (be|lie) ", text)
    struct = dotted_keys.struct_of(wrong.kind)
    field = next((f for f in msgspec.structs.fields(struct) if one and f.name == one[1]), None) if struct else None
    if field is None:
        return None
    key = f"{wrong.key}.{field.name}" if wrong.key else field.name
    usual = isinstance(field.default, (int, float)) and field.default > 0
    return f"change {key}, or leave it out for the default, {field.default}" if usual else f"change {key}"


def _quoted(wrong: _Wrong) -> str | None:
    """A name with dots in it, which TOML reads as tables: of the first one the name is put together again."""
    tables = [key for key, inner in wrong.given.items() if isinstance(inner, dict)]
    if not tables:
        return None
    parts, inner = [tables[0]], wrong.given[tables[0]]
    while isinstance(inner, dict) and inner:
        parts.append(next(iter(inner)))
        inner = inner[parts[-1]]
    name, text = f"{wrong.key.removesuffix('[...]')}.{json.dumps('.'.join(parts))}", json.dumps(inner, default=str)
    return f"quote the name: {name} = {text}, in a shell --set '{name}={text}'"


def _listed(wrong: _Wrong) -> str | None:
    if "array" not in wrong.expected:
        return None
    of = dotted_keys.elements_of(wrong.kind)
    if isinstance(wrong.given, dict):
        several = bool(of) and dotted_keys.struct_of(of[0]) is not None
        return f"write [[{wrong.key}]] with two brackets: there may be several" if several else wrong.write('["…"]')
    if of[1:] == (...,) and not isinstance(wrong.given, list):
        return wrong.write(f"[{json.dumps(wrong.given, default=str)}]")
    if of and of[1:] != (...,):
        given = wrong.given if isinstance(wrong.given, list) else [wrong.given]
        shown = [json.dumps(one, default=str) for one in given[: len(of)]]
        return wrong.write(f"[{', '.join(shown + ['…'] * (len(of) - len(shown)))}], a list of {len(of)}")
    return None


def _table(wrong: _Wrong) -> str | None:
    struct = dotted_keys.struct_of(wrong.kind)
    if "object" not in wrong.expected:
        return None
    keys = [f"{wrong.key}.{name}" for name in dotted_keys.fields_of(struct)][:3] if struct is not None else []
    return f"set its keys, as {', '.join(keys)}" if keys else f"write [{wrong.key}] and its keys below it, NAME = VALUE"


def _true_or_false(wrong: _Wrong) -> str | None:
    truth = _TRUTH.get(str(wrong.given).lower()) if "bool" in wrong.expected else None
    return wrong.write(truth) if truth else None


def _number(wrong: _Wrong) -> str | None:
    kinds = tuple(kind for word in wrong.expected for kind in _NUMBERS.get(word, ()))
    given = wrong.given
    if not kinds:
        return None
    if isinstance(given, float):
        if given.is_integer():
            return wrong.write(str(int(given)))
        return "write a whole number" + (": it is a count, not a share" if 0 < given < 1 else "")
    try:
        meant = toml_parser.loads(f"value = {given}", wrong.key)["value"] if isinstance(given, str) else None
    except (tomllib.TOMLDecodeError, ConfigError):
        return None
    return f"{wrong.write(given)}, without the quotes" if type(meant) in kinds else None


def _string(wrong: _Wrong) -> str | None:
    plain = "str" in wrong.expected and isinstance(wrong.given, (bool, int, float))
    return f"{wrong.write(json.dumps(json.dumps(wrong.given)))}, with the quotes" if plain else None
