"""Hooks of ``accelerate.Accelerator``: the checkpoints that a program's own loop saves."""

from __future__ import annotations

import functools
import time
from types import ModuleType
from typing import Any

from .guard import guarded
from .progress import get_progress


def install(module: ModuleType) -> None:
    """Hook ``Accelerator.save_state`` and ``load_state``. ``module``: ``accelerate.accelerator``."""
    _hook(module.Accelerator, "save_state", guarded(_report_save))
    _hook(module.Accelerator, "load_state", guarded(_report_load))


def _hook(accelerator_class: Any, name: str, report: Any) -> None:
    original = getattr(accelerator_class, name)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = original(self, *args, **kwargs)
        path = result if isinstance(result, str) else args[0] if args else kwargs.get("input_dir")
        report(str(path or ""), time.monotonic() - began)
        return result

    setattr(accelerator_class, name, call)


def _report_save(path: str, seconds: float) -> None:
    progress = get_progress()
    if progress is not None and not progress.framework and progress.step and path:
        progress.record_checkpoint(path, seconds)


def _report_load(path: str, seconds: float) -> None:
    """Say that a state was loaded; its step shows in the optimizer's state at the next step."""
    progress = get_progress()
    if progress is not None and not progress.framework:
        progress.note_restore(path, seconds)
