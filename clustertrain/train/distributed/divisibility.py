"""What is split over ranks must divide, and the error shows the arithmetic."""

from __future__ import annotations

from clustertrain.errors import ConfigError


def check(what: str, size: int, by: str, ranks: int) -> None:
    """``what`` has ``size`` parts, to be split over ``ranks`` ranks, the degree ``by``. Raises ConfigError."""
    if size % ranks:
        low = size // ranks * ranks
        raise ConfigError(
            f"{what} = {size} does not divide over {by} = {ranks}: {size} / {ranks} = {size / ranks:g}",
            fix=f"use {f'{low} or ' if low else ''}{low + ranks}, or a {by} that divides {size}",
        )
