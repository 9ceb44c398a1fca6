"""Hooks of Lightning's ``Fabric``: the checkpoints that a program's own loop saves, such as those of litgpt."""

from __future__ import annotations

import os
import time
from types import ModuleType
from typing import Any

from . import calls
from .calls import get_own_progress


def install(module: ModuleType) -> None:
    """Hook ``Fabric.save`` and ``load``. ``module``: ``lightning.fabric.fabric`` or ``lightning_fabric.fabric``."""
    calls.hook(module.Fabric, "save", _report_save, before=calls.begin_save)
    calls.hook(module.Fabric, "load", _report_load)


def _report_save(result: Any, began: float, fabric: Any, path: Any, state: Any, *args: Any, **kwargs: Any) -> None:
    """Record a checkpoint from which training can continue: the model alone is an export."""
    progress = get_own_progress()
    if progress is not None and progress.step and any(map(_is_optimizer, state.values())):
        progress.record_checkpoint(os.fspath(path), time.monotonic() - began)


def _is_optimizer(value: Any) -> bool:
    """Return whether ``value`` is an optimizer or the state of one."""
    return hasattr(value, "param_groups") or (isinstance(value, dict) and "param_groups" in value)


def _report_load(result: Any, began: float, fabric: Any, path: Any, *args: Any, **kwargs: Any) -> None:
    """Say that a state was loaded; its step shows at the next step."""
    progress = get_own_progress()
    if progress is not None:
        progress.note_restore(os.fspath(path), time.monotonic() - began)
