"""The packages that the base install lacks: which extra of clustertrain installs each, and the error without it.

The extras are in ``pyproject.toml``. Every import of one of their packages is preceded by :func:`require`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping

from clustertrain.errors import UnsuitableEnvironment

EXTRAS: Mapping[str, str] = {
    "torch": "train",
    "torchsnapshot": "torchsnapshot",
    "pyarrow": "report",
    "prometheus_client": "prometheus",
    "tensorboard": "tensorboard",
    "mcp": "mcp",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "fsspec": "object-storage",
    "s3fs": "object-storage",
    "kornia": "augment",
    "PIL": "images",
    "sklearn": "examples",
    "pytorch_optimizer": "optimizers",
    "torchao": "fp8",
    "tokenizers": "tokenizers",
}
"""Extra by the name under which its package is imported."""
MIN_TORCH = (2, 10)
"""Oldest version of torch with which the trainer runs, as in the extra ``train``."""


def is_installed(package: str) -> bool:
    """Return whether ``package`` can be imported. A folder of that name does not count: wandb creates one."""
    module_spec = importlib.util.find_spec(package)
    return module_spec is not None and module_spec.origin is not None


def install_command(package: str, python: str = "") -> str:
    """Return the command that installs the extra of ``package`` for the interpreter ``python``, by default this one."""
    return f"{python or sys.executable} -m pip install 'clustertrain[{EXTRAS[package]}]'"


def missing(package: str, needed_by: str, python: str = "", *, alternative: str = "") -> UnsuitableEnvironment:
    """Return the error that ``needed_by`` lacks ``package``.

    Args:
        python: the interpreter that lacks it; by default this one.
        alternative: what the user can do instead of installing it.
    """
    where = "" if python in ("", sys.executable) else f" for {python}"
    fix = install_command(package, python) + (f", or {alternative}" if alternative else "")
    return UnsuitableEnvironment(f"{needed_by}: the package {package} is not installed{where}", fix=fix)


def require(module: str, needed_by: str, *, alternative: str = "") -> None:
    """Import ``module``, which belongs to an extra, so that an import statement after this call succeeds.

    Raises:
        UnsuitableEnvironment: its package is not installed, or cannot be imported; the fix has the pip command.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(module)
    except ImportError as e:
        error = missing(package, needed_by, alternative=alternative)
        if is_installed(package):
            error = UnsuitableEnvironment(f"{needed_by}: {module} cannot be imported: {e}", fix=error.fix)
        raise error from e
