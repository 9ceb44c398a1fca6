"""What is split over ranks must divide, and the error shows the arithmetic."""

from __future__ import annotations

from clustertrain.errors import ConfigError


def check(name: str, size: int, degree: str, ranks: int) -> None:
    """``name`` has ``size`` parts, to be split over ``ranks`` ranks, the degree ``degree``. Raises ConfigError."""
    if size % ranks:
        low = size // ranks * ranks
        raise ConfigError(
            f"{name} = {size} does not divide over {degree} = {ranks}: {size} / {ranks} = {size / ranks:g}",
            fix=f"use {f'{low} or ' if low else ''}{low + ranks}, or a {degree} that divides {size}",
        )
