"""Functions with which a program saves and loads: each call is reported, without the calls that it makes itself.

``Accelerator.save_state`` may call ``torch.distributed.checkpoint.save``, for instance.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, Callable

from . import heartbeat
from .guard import guarded
from .progress import Progress, get_progress

_is_inside = False  # whether the main thread is inside a hooked function


def hook(owner: Any, name: str, report: Callable[..., None], before: Callable[..., None] | None = None) -> None:
    """Replace the function ``name`` of a class or module by one that reports its calls in the main thread.

    Args:
        report: called after a call that did not raise, with its result, its beginning (monotonic, s) and its arguments.
        before: called before a call, with its arguments.
    """
    original = getattr(owner, name)
    report, before = guarded(report), guarded(before) if before is not None else None

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _is_inside  # noqa: PLW0603
        if _is_inside or threading.current_thread() is not threading.main_thread():
            return original(*args, **kwargs)
        _is_inside = True
        try:
            if before is not None:
                before(*args, **kwargs)
            began = time.monotonic()
            result = original(*args, **kwargs)
        finally:
            _is_inside = False
        report(result, began, *args, **kwargs)
        return result

    setattr(owner, name, call)


def get_own_progress() -> Progress | None:
    """Return the progress of a program whose own loop saves, not a framework for it; None otherwise."""
    progress = get_progress()
    return progress if progress is not None and not progress.framework else None


def begin_save(*args: Any, **kwargs: Any) -> None:
    """Say that a save begins, which may take longer than a step."""
    progress = get_own_progress()
    if progress is not None:
        progress.enter(heartbeat.CHECKPOINT)
