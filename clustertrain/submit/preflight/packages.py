"""Packages that a recipe needs beside those that come with clustertrain, looked for before the queue."""

from __future__ import annotations

import importlib.util
import sys

from clustertrain.config.data import DIGITS
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError

# As train/optimizers/catalogue has them, which imports torch.
_PYTORCH_OPTIMIZERS = frozenset({"lion", "lamb", "lars", "soap", "shampoo"})


def is_installed(package: str) -> bool:
    """Not only a folder of that name, as wandb makes one where it is used."""
    module_spec = importlib.util.find_spec(package)
    return module_spec is not None and module_spec.origin is not None


def check_packages(recipe: Recipe, python: str) -> None:
    """``python`` is the interpreter of the job; of another one than this nothing is known here.

    Raises:
        ConfigError: a package is missing.
    """
    if python != sys.executable:
        return
    name, digits = recipe.optim.name, DIGITS in (recipe.data.path, recipe.data.validation_path)
    for needed, key, package, extra in (
        (name in _PYTORCH_OPTIMIZERS, f"optim.name = {name!r}", "pytorch_optimizer", "optimizers"),
        (name == "adamw8bit", f"optim.name = {name!r}", "torchao", "optimizers"),
        (recipe.train.precision == "fp8", "train.precision = 'fp8'", "torchao", "fp8"),
        (recipe.data.augment.is_enabled, "data.augment", "kornia", "augment"),
        (digits, f"data.path = {DIGITS!r}", "sklearn", "examples"),
    ):
        if needed and not is_installed(package):
            raise ConfigError(
                f"{key}: the package {package} is not installed", fix=f"pip install 'clustertrain[{extra}]'"
            )
