"""Cells of a table's row: text, and numbers."""

from __future__ import annotations

from collections.abc import Mapping

from clustertrain.errors import ConfigError

MAX_VALUE = 1e9  # larger values are mistakes


def cell(row: Mapping[str, str], name: str) -> str:
    """Return a cell's text; empty if the row lacks it."""
    return (row.get(name) or "").strip()


def parse_number(row: Mapping[str, str], name: str, default: float = 0.0) -> float:
    """Return the number in a cell, or ``default`` if it is empty. Raise ConfigError if it is not a valid number."""
    text = cell(row, name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name} = {text!r} is not a number") from None
    if not 0 <= value <= MAX_VALUE:  # also rejects NaN
        raise ConfigError(f"{name} = {text!r} is not a number from 0 to {MAX_VALUE:g}")
    return value
