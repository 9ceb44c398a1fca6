"""What is known of images with classes, and what a built-in convnet must have for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clustertrain.config.checks.slice_checks import BUILT_IN_CLASSES
from clustertrain.config.data import DIGITS
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError

SHAPES = "shapes"


@dataclass(frozen=True)
class ImageDatasetInfo:
    """``classes``, ``samples``: None where only reading the data tells."""

    channels: int
    classes: int | None
    samples: int | None = None


# By data.path.
BUILT_IN_IMAGES: Mapping[str, ImageDatasetInfo] = {
    "": ImageDatasetInfo(3, BUILT_IN_CLASSES, 50_000),
    SHAPES: ImageDatasetInfo(3, BUILT_IN_CLASSES, 50_000),
    DIGITS: ImageDatasetInfo(1, BUILT_IN_CLASSES, 1797),
}


def check_images(recipe: Recipe, key: str, dataset: ImageDatasetInfo) -> None:
    """Raises ConfigError where the built-in convnet of ``recipe`` cannot learn from what is at ``data.<key>``."""
    spec = recipe.model.convnet
    if recipe.model.kind != "convnet" or recipe.model.entry:
        return
    mismatches = {} if dataset.channels == spec.channels else {"channels": dataset.channels}
    if dataset.classes is not None and dataset.classes > spec.classes:
        mismatches["classes"] = dataset.classes
    if mismatches:
        differences = " and ".join(f"{name} {n}, not {getattr(spec, name)}" for name, n in mismatches.items())
        raise ConfigError(
            f"data.{key} = {getattr(recipe.data, key)!r} and model.convnet: the images have {differences}",
            fix="set " + ", ".join(f"model.convnet.{name} = {n}" for name, n in mismatches.items()),
        )


def check_built_in_images(recipe: Recipe) -> None:
    """Raises ConfigError as :func:`check_images`, for images that come with a package."""
    if recipe.data_kind != "images":
        return
    for key, path in (("path", recipe.data.path), ("validation_path", recipe.data.validation_path)):
        if path in BUILT_IN_IMAGES and (path or key == "path"):
            check_images(recipe, key, BUILT_IN_IMAGES[path])
