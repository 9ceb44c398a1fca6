"""Cells of a table's row: text, and numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from clustertrain.errors import ConfigError

_ZERO_STAGE = re.compile(r"zero_(?=[123])")
_SHARDING_SYNONYMS = {
    "fsdp": "fsdp_full", "fsdp1": "fsdp_full", "fsdp2": "fsdp_full", "full_shard": "fsdp_full",
    "fully_shard": "fsdp_full", "shard_grad_op": "fsdp_grad_op", "hybrid_shard": "hsdp", "no_shard": "ddp",
}  # fmt: skip
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


def with_usual_spelling(row: Mapping[str, str]) -> dict[str, str]:
    """Return ``row`` with sharding and checkpointing in the table's spelling: ``zero3`` for ``ZeRO-3``."""
    sharding = _ZERO_STAGE.sub("zero", re.sub(r"[\s_-]+", "_", cell(row, "fsdp_or_zero").lower()))
    spelled = {
        "fsdp_or_zero": _SHARDING_SYNONYMS.get(sharding, sharding),
        "act_ckpt": cell(row, "act_ckpt").lower(),
    }
    return {**row, **{name: text for name, text in spelled.items() if name in row}}
