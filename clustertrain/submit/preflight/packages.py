"""Checks of the optional packages that a recipe needs, before submission."""

from __future__ import annotations

import importlib.util
import sys

from clustertrain.config.data import DIGITS
from clustertrain.config.optimizers import OPTIMIZERS
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError


def is_installed(package: str) -> bool:
    """Return whether ``package`` can be imported. A folder of that name does not count: wandb creates one."""
    module_spec = importlib.util.find_spec(package)
    return module_spec is not None and module_spec.origin is not None


def check_packages(recipe: Recipe, python: str) -> None:
    """Check the packages of the job's interpreter ``python``, if it is the one that runs this.

    Raises:
        ConfigError: a package is not installed.
    """
    if python != sys.executable:
        return
    name, digits = recipe.optim.name, DIGITS in (recipe.data.path, recipe.data.validation_path)
    optimizer = OPTIMIZERS[name]
    for needed, key, package, extra in (
        (optimizer.package, f"optim.name = {name!r}", optimizer.package, optimizer.extra),
        (recipe.train.precision == "fp8", "train.precision = 'fp8'", "torchao", "fp8"),
        (recipe.data.augment.is_enabled, "data.augment", "kornia", "augment"),
        (digits, f"data.path = {DIGITS!r}", "sklearn", "examples"),
    ):
        if needed and not is_installed(package):
            raise ConfigError(
                f"{key}: the package {package} is not installed", fix=f"pip install 'clustertrain[{extra}]'"
            )
