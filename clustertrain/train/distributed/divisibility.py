"""Check that a size divides over ranks, with the arithmetic in the error."""

from __future__ import annotations

from clustertrain.errors import ConfigError


def check(name: str, size: int, degree: str, ranks: int) -> None:
    """Raise ConfigError if ``size``, the value of ``name``, does not divide over ``ranks``, the value of ``degree``."""
    if size % ranks:
        low = size // ranks * ranks
        raise ConfigError(
            f"{name} = {size} does not divide over {degree} = {ranks}: {size} / {ranks} = {size / ranks:g}",
            fix=f"use {f'{low} or ' if low else ''}{low + ranks}, or a {degree} that divides {size}",
        )
