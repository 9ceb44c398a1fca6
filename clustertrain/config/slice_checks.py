"""Slices of the validation data: which a recipe names, and which there can be, as far as it tells that itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clustertrain.config.data import DIGITS
from clustertrain.config.evaluation import PREFIX, SLICE

if TYPE_CHECKING:
    from clustertrain.config.recipe import Recipe

BUILT_IN = 10  # classes of the drawn shapes, and of the digits
_LISTED = 20


def numbered(classes: int) -> tuple[str, ...]:
    """The slices of images whose classes have no names."""
    return tuple(f"class-{i}" for i in range(classes))


def known(recipe: Recipe) -> tuple[str, ...] | None:
    """Those that there can be; None where only the data tells."""
    path, kind = recipe.data.validation_path or recipe.data.path, recipe.data_kind
    if recipe.model.kind == "two-tower":  # whose loss compares samples: none has a figure of its own
        return ()
    if kind == "images" and path.endswith(".npz") and not recipe.model.entry:
        return numbered(recipe.model.convnet.classes)
    if (kind == "images" and path in ("", "shapes", DIGITS)) or (kind == "pairs" and path == DIGITS):
        return numbered(BUILT_IN)
    return () if recipe.is_text else None


def check(recipe: Recipe, there: Sequence[str]) -> None:
    """Raises ValueError for a slice that ``recipe`` names and that is none of those that are ``there``."""
    for key, name in _named(recipe):
        if name not in there:
            some = ", ".join(there[:_LISTED]) + (f" and {len(there) - _LISTED} more" if len(there) > _LISTED else "")
            raise ValueError(f"{key}: the validation data has no slice {name!r}; it has {some or 'none'}")


def check_agreement(recipe: Recipe) -> None:
    """Raises ValueError where one cannot be, or would not be told apart from the others."""
    contract, there = recipe.contract, known(recipe)
    if there is not None:
        check(recipe, there)
    for key, name in _named(recipe):
        if contract.slices and name not in contract.slices:
            raise ValueError(
                f"{key}: only contract.slices = {list(contract.slices)} are told apart: name {name!r} there too"
            )


def _named(recipe: Recipe) -> list[tuple[str, str]]:
    """(where it is named, the slice)."""
    if not recipe.data.validates:
        return []
    found = [("contract.slices", name) for name in recipe.contract.slices]
    scalars = {"contract.metric": recipe.contract.metric, "checkpoint.best": recipe.checkpoint.best}
    for key, scalar in scalars.items():
        metric, _, name = scalar.partition(SLICE)
        if name and metric.startswith(PREFIX):
            found.append((f"{key} = {scalar!r}", name))
    return found
