"""Checks of the slices that a recipe names against the slices of its validation data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clustertrain.config.data import DIGITS
from clustertrain.config.evaluation import SLICE_SEPARATOR, VALIDATION_PREFIX

if TYPE_CHECKING:
    from clustertrain.config.recipe import Recipe

BUILT_IN_CLASSES = 10  # classes of the drawn shapes and of the digits
_MAX_LISTED = 20


def class_slices(classes: int) -> tuple[str, ...]:
    """Return the slice names of images whose classes have no names."""
    return tuple(f"class-{i}" for i in range(classes))


def list_slices(recipe: Recipe) -> tuple[str, ...] | None:
    """Return the slices of the validation data; None if they are only known after reading the data."""
    path, kind = recipe.data.validation_path or recipe.data.path, recipe.data_kind
    if recipe.model.kind == "two-tower":  # its loss compares samples, so a single sample has no value
        return ()
    if kind == "images" and path.endswith(".npz") and not recipe.model.entry:
        return class_slices(recipe.model.convnet.classes)
    if (kind == "images" and path in ("", "shapes", DIGITS)) or (kind == "pairs" and path == DIGITS):
        return class_slices(BUILT_IN_CLASSES)
    return () if recipe.is_text else None


def check_slices(recipe: Recipe, available: Sequence[str]) -> None:
    """Raise ValueError for a slice that ``recipe`` names and that is not ``available``."""
    for key, name in _requested_slices(recipe):
        if name not in available:
            listed = ", ".join(available[:_MAX_LISTED]) + (
                f" and {len(available) - _MAX_LISTED} more" if len(available) > _MAX_LISTED else ""
            )
            raise ValueError(f"{key}: the validation data has no slice {name!r}; it has {listed or 'none'}")


def check_consistency(recipe: Recipe) -> None:
    """Raise ValueError if a slice does not exist or would not be reported."""
    contract, available = recipe.contract, list_slices(recipe)
    if available is not None:
        check_slices(recipe, available)
    for key, name in _requested_slices(recipe):
        if contract.slices and name not in contract.slices:
            raise ValueError(f"{key}: only contract.slices = {list(contract.slices)} are reported: add {name!r} there")


def _requested_slices(recipe: Recipe) -> list[tuple[str, str]]:
    """Return (key that names it, slice) pairs."""
    if not recipe.data.has_validation:
        return []
    requested = [("contract.slices", name) for name in recipe.contract.slices]
    scalars = {"contract.metric": recipe.contract.metric, "checkpoint.best": recipe.checkpoint.best}
    for key, scalar in scalars.items():
        metric, _, name = scalar.partition(SLICE_SEPARATOR)
        if name and metric.startswith(VALIDATION_PREFIX):
            requested.append((f"{key} = {scalar!r}", name))
    return requested
