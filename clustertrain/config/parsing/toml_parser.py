"""TOML text as tables. What tomllib lets through as an exception of its own or as a trap for the code behind it fails
here: nesting without end, and numbers with more digits than Python converts."""

from __future__ import annotations

import sys
import tomllib
from typing import Any

from clustertrain.errors import ConfigError

MAX_DEPTH = 64  # of tables and lists in each other; the deepest key of a recipe has 4


def loads(text: str, source: str) -> dict[str, Any]:
    """Raises tomllib.TOMLDecodeError for what is not TOML, and ConfigError for nesting and digits; names ``source``."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise _too_deep_error(source) from None
    except ValueError as e:  # of int(), see sys.set_int_max_str_digits
        digits = sys.get_int_max_str_digits()
        raise ConfigError(
            f"{source}: a number of more than {digits} digits", fix="write a number that 64 bits hold: up to 19 digits"
        ) from e
    check_depth(document, source)
    return document


def check_depth(document: Any, source: str) -> None:
    """Raises ConfigError where lists and tables are nested too deep. No recursion, whose own limit this protects."""
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _list_children(value)]
        if not level:
            return
    raise _too_deep_error(source)


def _list_children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _too_deep_error(source: str) -> ConfigError:
    return ConfigError(
        f"{source}: tables or lists nested more than {MAX_DEPTH} levels deep",
        fix="no key needs that: look for brackets or dots that repeat",
    )
