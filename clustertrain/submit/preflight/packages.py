"""Checks of the optional packages that a recipe needs, before submission."""

from __future__ import annotations

from clustertrain import extras
from clustertrain.config.data import DIGITS
from clustertrain.config.optimizers import OPTIMIZERS
from clustertrain.config.parsing.saved_datasets import is_saved_dataset
from clustertrain.config.recipe import Recipe
from clustertrain.submit.program.job_python import Interpreter


def check_packages(recipe: Recipe, python: Interpreter) -> None:
    """Check the packages that the ranks need, in their interpreter.

    Raises:
        UnsuitableEnvironment: a package is known to be missing.
    """
    name, digits = recipe.optim.name, DIGITS in (recipe.data.path, recipe.data.validation_path)
    engine, package = recipe.checkpoint.engine, OPTIMIZERS[name].package
    is_chat, paths = recipe.data_kind == "chat", (recipe.data_path, recipe.validation_path)
    has_arrow = any(
        path is not None and ((is_chat and path.suffix == ".parquet") or is_saved_dataset(path)) for path in paths
    )
    for needed, key, required in (
        (package, f"optim.name = {name!r}", package),
        (recipe.train.precision == "fp8", "train.precision = 'fp8'", "torchao"),
        (recipe.data.augment.is_enabled, "data.augment", "kornia"),
        (digits, f"data.path = {DIGITS!r}", "sklearn"),
        (is_chat, "data.kind = 'chat'", "tokenizers"),
        (has_arrow, "data.path", "pyarrow"),
        (engine == "torchsnapshot", f"checkpoint.engine = {engine!r}", "torchsnapshot"),
        (recipe.checkpoint.remote, f"checkpoint.remote = {recipe.checkpoint.remote!r}", "fsspec"),
    ):
        if needed and python.lacks(required):
            raise extras.missing(required, key, python.path)


def check_agent_packages(recipe: Recipe, python: Interpreter) -> None:
    """Check the packages that the node agents need, in their interpreter.

    Raises:
        UnsuitableEnvironment: a package is known to be missing.
    """
    prometheus = recipe.telemetry.prometheus
    if recipe.telemetry.enabled and (prometheus.port or prometheus.textfile) and python.lacks("prometheus_client"):
        raise extras.missing("prometheus_client", "telemetry.prometheus", python.path)
