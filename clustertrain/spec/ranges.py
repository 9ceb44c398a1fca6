"""Checks of values, for the ``__post_init__`` of the structs in this package."""

from __future__ import annotations


def positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} = {value}: must be greater than 0")


def within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} = {value}: must lie between {low:g} and {high:g}")
