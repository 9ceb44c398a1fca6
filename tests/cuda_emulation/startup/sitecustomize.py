"""Gives each Python process with this folder on its PYTHONPATH the emulated device, if it imports torch.

To clustertrain it has GPUs too, which are device files elsewhere.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any


def _load_device() -> None:
    from tests.cuda_emulation import build

    build.load_libraries()


def _finish_torch(_module: ModuleType) -> None:
    import tests.cuda_emulation.device  # noqa: F401


def _have_gpu(module: ModuleType) -> None:
    module._has_nvidia_gpu = lambda: True  # type: ignore[attr-defined]


# What to do before and after the import of a module.
ACTIONS: dict[str, tuple[Any, Any]] = {
    "torch": (_load_device, _finish_torch),
    "clustertrain.submit.resolve": (lambda: None, _have_gpu),
}


class _Loader(importlib.abc.Loader):
    """Loads a module as usual, with its actions before and after."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        ACTIONS[spec.name][0]()
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        ACTIONS[module.__name__][1](module)


class _Finder(importlib.abc.MetaPathFinder):
    _is_searching = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if self._is_searching or fullname not in ACTIONS:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
