"""Parsing of TOML with limits on what tomllib handles badly.

These are nesting that exceeds Python's recursion limit, and integers with more digits than Python converts.
"""

from __future__ import annotations

import sys
import tomllib
from typing import Any

from clustertrain.errors import ConfigError

MAX_DEPTH = 64  # nested tables and lists; the deepest key of a recipe has 4


def loads(text: str, source: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        tomllib.TOMLDecodeError: ``text`` is not TOML.
        ConfigError: the nesting is too deep or a number too long; the message has ``source``.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise _too_deep_error(source) from None
    except ValueError as e:  # from int(), see sys.set_int_max_str_digits
        digits = sys.get_int_max_str_digits()
        raise ConfigError(
            f"{source}: a number of more than {digits} digits",
            fix="write a number that fits in 64 bits: up to 19 digits",
        ) from e
    check_depth(document, source)
    return document


def check_depth(document: Any, source: str) -> None:
    """Raise ConfigError if lists and tables are nested too deeply."""
    # Iterative, because it protects other code from the recursion limit.
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
        fix="no key needs that: look for repeated brackets or dots",
    )
