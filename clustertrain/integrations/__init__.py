"""Callbacks of other frameworks that do what the hooks in the ranks of a command do, for programs that add them.

Each module imports one framework, and nothing else that the base install lacks: ``ct.integrations.transformers``,
``lightning``, ``pytorch_lightning`` and ``accelerate``. Outside a run they do nothing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["accelerate", "lightning", "pytorch_lightning", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
