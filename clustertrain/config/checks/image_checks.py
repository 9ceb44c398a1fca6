"""Known image datasets, and the check that a built-in convnet fits the images."""

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
    """Properties of a dataset of images with classes."""

    channels: int
    classes: int | None
    """Number of classes; None if it is only known after reading the data."""
    samples: int | None = None
    """Number of samples; None if it is only known after reading the data."""


# Key: data.path
BUILT_IN_IMAGES: Mapping[str, ImageDatasetInfo] = {
    "": ImageDatasetInfo(3, BUILT_IN_CLASSES, 50_000),
    SHAPES: ImageDatasetInfo(3, BUILT_IN_CLASSES, 50_000),
    DIGITS: ImageDatasetInfo(1, BUILT_IN_CLASSES, 1797),
}


def check_images(recipe: Recipe, key: str, dataset: ImageDatasetInfo) -> None:
    """Raise ConfigError if the built-in convnet of ``recipe`` does not fit the images at ``data.<key>``."""
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
    """Raise ConfigError if the built-in convnet of ``recipe`` does not fit built-in images."""
    if recipe.data_kind != "images":
        return
    for key, path in (("path", recipe.data.path), ("validation_path", recipe.data.validation_path)):
        if path in BUILT_IN_IMAGES and (path or key == "path"):
            check_images(recipe, key, BUILT_IN_IMAGES[path])
