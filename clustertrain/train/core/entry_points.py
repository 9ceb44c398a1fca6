"""User functions that a recipe names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clustertrain.config.parsing.documents import format_value
from clustertrain.errors import ConfigError


def load_function(name: str, key: str) -> Callable[..., Any]:
    """Import and return the function ``name``, in the form ``package.module:function``; ``key`` is its recipe key.

    Raises:
        ConfigError: the module or function does not exist, or is not callable.
    """
    module, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module}.".startswith(f"{e.name}."):
            raise  # a failed import inside the module
        raise ConfigError(
            f"{key} = {name!r}: no module {e.name!r}",
            fix="put it next to the recipe or in the folder where you run submit, or install it for the job's Python",
        ) from e
    for attribute in path.split("."):
        try:
            target = getattr(target, attribute)
        except AttributeError as e:
            raise ConfigError(f"{key} = {name!r}: {e}", fix="name a function in that module") from e
    if not callable(target):
        raise ConfigError(f"{key} = {name!r} is {type(target).__name__}", fix="name a function or a class")
    return target  # type: ignore[no-any-return]


def check_arguments(factory: Callable[..., Any], name: str, args: Mapping[str, Any], key: str) -> None:
    """Raise ConfigError if ``factory`` does not accept ``args``, the value of the recipe's ``key``."""
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as e:
        raise ConfigError(
            f"{key} = {format_value(dict(args))}: {name}: {e}", fix="give the arguments that it accepts"
        ) from e


def has_parameters(factory: Callable[..., Any], names: Sequence[str]) -> bool:
    """Return whether ``factory`` names all of ``names`` among its parameters."""
    try:
        return set(names) <= inspect.signature(factory).parameters.keys()
    except ValueError:  # built-in functions may have no signature
        return False
