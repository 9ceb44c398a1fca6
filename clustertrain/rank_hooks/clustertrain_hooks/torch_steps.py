"""Steps of ``torch.optim``: each one is a heartbeat, and the time between two is the time of a step."""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import Any

from .guard import guarded
from .progress import get_progress

_is_initializing = False


def install(module: ModuleType) -> None:
    """Count the steps of optimizers from now on. ``module``: ``torch.optim.optimizer``."""
    module.register_optimizer_step_post_hook(_StepCounter().count)


def install_initialization(module: Any) -> None:
    """Leave out a step that is none. ``module``: ``torch.distributed.checkpoint.state_dict``.

    Its functions fill the state of a new optimizer by a step with a learning rate of 0.
    """
    original = getattr(module, "_init_optim_state", None)
    if original is None:  # it is not public
        return

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        global _is_initializing  # noqa: PLW0603
        _is_initializing = True
        try:
            return original(*args, **kwargs)
        finally:
            _is_initializing = False

    module._init_optim_state = initialize


class _StepCounter:
    """Counter of the steps of the optimizer that stepped first; the others of a program step beside it."""

    def __init__(self) -> None:
        self._counted: weakref.ref[Any] | None = None
        self.count = guarded(self._count)

    def _count(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        progress = get_progress()
        if progress is None or progress.framework or _is_initializing:
            return
        counted = self._counted() if self._counted is not None else None
        if counted is None:
            self._counted = weakref.ref(optimizer)
            if not progress.wrote_row:
                progress.begin_at(_find_done_steps(optimizer) - 1)
        elif counted is not optimizer:
            return
        progress.end_step(progress.step + 1)


def _find_done_steps(optimizer: Any) -> int:
    """Return the steps in the optimizer's state, which a resumed program has restored; 0 for one without a count."""
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if step is not None:
            return int(step)  # a tensor: one wait for the device per attempt
    return 0
