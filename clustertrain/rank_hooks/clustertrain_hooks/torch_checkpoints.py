"""Hooks of ``torch.distributed.checkpoint``: the checkpoints of programs with FSDP2 and of plain torch.

A folder counts once its ``.metadata`` is there, which torch writes last.
"""

from __future__ import annotations

import os
import time
from types import ModuleType
from typing import Any

from . import calls, heartbeat
from .calls import get_own_progress


def install_save(module: ModuleType) -> None:
    """Hook ``save`` and ``async_save``. ``module``: ``torch.distributed.checkpoint.state_dict_saver``."""
    calls.hook(module, "save", _report_save, before=_begin_save)
    if hasattr(module, "async_save"):  # torch 2.3
        calls.hook(module, "async_save", _follow_save, before=_begin_save)


def install_load(module: ModuleType) -> None:
    """Hook ``load``. ``module``: ``torch.distributed.checkpoint.state_dict_loader``."""
    calls.hook(module, "load", _report_load)


def _find_folder(storage: Any, options: dict[str, Any]) -> str:
    """Return the folder that a call names, empty if it names none: the storage may be no filesystem."""
    folder = options.get("checkpoint_id") or getattr(storage, "path", None)
    return os.path.abspath(folder) if isinstance(folder, (str, os.PathLike)) else ""


def _is_written(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, ".metadata"))


def _begin_save(state_dict: Any, storage_writer: Any = None, **options: Any) -> None:
    """Say that a save begins, and that it replaces a checkpoint: the old metadata stays there until the end."""
    calls.begin_save()
    progress = get_own_progress()
    folder = _find_folder(storage_writer, options)
    if progress is not None and folder and _is_written(folder):
        progress.record_overwriting(folder)


def _report_save(result: Any, began: float, state_dict: Any, storage_writer: Any = None, **options: Any) -> None:
    progress = get_own_progress()
    folder = _find_folder(storage_writer, options)
    if progress is not None and progress.step and folder and _is_written(folder):
        progress.record_checkpoint(folder, time.monotonic() - began)


def _follow_save(result: Any, began: float, state_dict: Any, storage_writer: Any = None, **options: Any) -> None:
    """Report the checkpoint once it is written, which the main thread sees at the end of a step, or at the exit."""
    progress = get_own_progress()
    folder = _find_folder(storage_writer, options)
    if progress is None or not progress.step or not folder:
        return
    stall_s, step, ended = time.monotonic() - began, progress.step, []
    future = getattr(result, "upload_completion", result)  # torch 2.9 may return two futures
    future.add_done_callback(lambda _: ended.append(time.monotonic()))
    progress.exclude(stall_s)
    progress.enter(heartbeat.TRAIN)

    def report_if_done() -> bool:
        if not future.done():
            return False
        if future.exception() is None and _is_written(folder):
            end = ended[0] if ended else time.monotonic()  # the callbacks of a future run after it is done
            progress.record_late_checkpoint(folder, step, began, stall_s=stall_s, save_s=end - began)
        return True

    progress.watch(report_if_done)


def _report_load(result: Any, began: float, state_dict: Any, storage_reader: Any = None, **options: Any) -> None:
    progress = get_own_progress()
    folder = _find_folder(storage_reader, options)
    if progress is not None and folder:
        progress.note_restore(folder, time.monotonic() - began)
