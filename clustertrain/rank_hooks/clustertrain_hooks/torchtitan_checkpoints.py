"""Hook of torchtitan's checkpoint manager, which its Trainer calls after each step: the agreed stop with its own save.

torchtitan saves with ``torch.distributed.checkpoint``, whose hooks record that, and resumes by itself.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from .guard import guarded
from .progress import get_progress
from .stop_step import EXIT_STOPPED, StopStep

FRAMEWORK = "torchtitan"
_stop: StopStep | None = None


def install(module: ModuleType) -> None:
    """Hook ``save`` of the class of checkpoint managers.

    ``module``: ``torchtitan.components.checkpoint``, and from 0.3 on ``torchtitan.components.checkpointer.base``.
    """
    manager_class: Any = getattr(module, "BaseCheckpointManager", None) or module.CheckpointManager
    original = manager_class.save
    if hasattr(original, "can_stop"):  # the one module imports the class from the other
        return
    is_stop_due = guarded(_is_stop_due, on_failure=_give_up)

    @functools.wraps(original)
    def save(self: Any, curr_step: int, last_step: bool = False, *args: Any, **kwargs: Any) -> Any:
        if not last_step and is_stop_due(self):
            # As at the last step it saves whatever the interval, and waits; but all of the state, not the model alone.
            self.last_save_model_only = self.last_save_in_hf = False
            original(self, curr_step, True, *args, **kwargs)
            sys.exit(EXIT_STOPPED)
        result = original(self, curr_step, last_step, *args, **kwargs)
        if last_step and _stop is not None:
            guarded(_stop.withdraw)()  # the training is over
        return result

    save.can_stop = True  # type: ignore[attr-defined]
    manager_class.save = save


def _give_up(manager: Any) -> None:
    if _stop is not None:
        _stop.give_up()


def _is_stop_due(manager: Any) -> bool:
    """Return whether the ranks have agreed to stop after the step that is done."""
    global _stop  # noqa: PLW0603
    progress = get_progress()
    if progress is None or not progress.step or not manager.enable or getattr(manager, "load_only", False):
        return False  # it cannot save: SIGTERM ends it
    if _stop is None:
        _stop = StopStep(progress.rank)
        _stop.offer(FRAMEWORK)
    if not _stop.is_reached(progress.step):
        return False
    progress.record_stop(progress.step)
    return True
