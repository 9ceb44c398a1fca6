"""What is known of images with classes, and what a built-in convnet must have for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clustertrain.config.data import DIGITS
from clustertrain.config.recipe import Recipe
from clustertrain.config.slice_checks import BUILT_IN
from clustertrain.errors import ConfigError

SHAPES = "shapes"


@dataclass(frozen=True)
class Known:
    """``classes``, ``samples``: None where only reading the data tells."""

    channels: int
    classes: int | None
    samples: int | None = None


# By data.path.
KNOWN: Mapping[str, Known] = {
    "": Known(3, BUILT_IN, 50_000),
    SHAPES: Known(3, BUILT_IN, 50_000),
    DIGITS: Known(1, BUILT_IN, 1797),
}


def check(recipe: Recipe, key: str, there: Known) -> None:
    """Raises ConfigError where the built-in convnet of ``recipe`` cannot learn from what is at ``data.<key>``."""
    spec = recipe.model.convnet
    if recipe.model.kind != "convnet" or recipe.model.entry:
        return
    wrong = {} if there.channels == spec.channels else {"channels": there.channels}
    if there.classes is not None and there.classes > spec.classes:
        wrong["classes"] = there.classes
    if wrong:
        apart = " and ".join(f"{name} {n}, not {getattr(spec, name)}" for name, n in wrong.items())
        raise ConfigError(
            f"data.{key} = {getattr(recipe.data, key)!r} and model.convnet: the images have {apart}",
            fix="set " + ", ".join(f"model.convnet.{name} = {n}" for name, n in wrong.items()),
        )


def check_built_in(recipe: Recipe) -> None:
    """Raises ConfigError as :func:`check`, for images that come with a package."""
    if recipe.data_kind != "images":
        return
    for key, path in (("path", recipe.data.path), ("validation_path", recipe.data.validation_path)):
        if path in KNOWN and (path or key == "path"):
            check(recipe, key, KNOWN[path])
