"""Hooks of ``accelerate.Accelerator``: the checkpoints that a program's own loop saves."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

from . import calls
from .calls import get_own_progress


def install(module: ModuleType) -> None:
    """Hook ``Accelerator.save_state`` and ``load_state``. ``module``: ``accelerate.accelerator``."""
    calls.hook(module.Accelerator, "save_state", _report_save, before=calls.begin_save)
    calls.hook(module.Accelerator, "load_state", _report_load)


def _report_save(
    result: Any, began: float, accelerator: Any, output_dir: Any = None, *args: Any, **kwargs: Any
) -> None:
    progress = get_own_progress()
    path = str(result or output_dir or "")  # the result counts: accelerate may name the folder itself
    if progress is not None and progress.step and path:
        progress.record_checkpoint(path, time.monotonic() - began)


def _report_load(result: Any, began: float, accelerator: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
    """Say that a state was loaded; its step shows at the next step."""
    progress = get_own_progress()
    if progress is not None:
        progress.note_restore(str(input_dir or ""), time.monotonic() - began)
