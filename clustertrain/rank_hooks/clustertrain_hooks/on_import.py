"""Calls of functions after the import of modules."""

from __future__ import annotations

import importlib
import sys

from .guard import guarded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType
    from typing import Any


class _Finder:
    """A finder at the front of ``sys.meta_path`` that finds the hooked modules with the finders after it."""

    def __init__(self, functions: Mapping[str, str]) -> None:
        self._functions = dict(functions)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name not in self._functions:
            return None
        function = self._functions[name]
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = None if finder is self or find_spec is None else find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._call_after_import(spec.loader, name, function)
                return spec
        return None

    def _call_after_import(self, loader: Any, name: str, function: str) -> None:
        exec_module = loader.exec_module

        def exec_and_call(module: ModuleType) -> None:
            exec_module(module)
            if module.__name__ == name and name in self._functions:
                del self._functions[name]
                guarded(_call, hook=function)(function, module)

        loader.exec_module = exec_and_call


def install(functions: Mapping[str, str]) -> None:
    """Call ``package.module.function(imported)`` after the import of each key of ``functions``."""
    sys.meta_path.insert(0, _Finder(functions))


def _call(function: str, module: ModuleType) -> None:
    module_name, _, name = function.rpartition(".")
    getattr(importlib.import_module(module_name), name)(module)
