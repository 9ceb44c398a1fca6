"""A check of the state that a script passes to ``session.steps``: nothing that a resume needs is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from clustertrain.train.stability.warnings import TrainingWarning


def find_missing_scheduler(state: Mapping[str, Any]) -> TrainingWarning | None:
    """Return a warning if an optimizer of ``state`` has a learning-rate scheduler of torch, and ``state`` has none.

    After a resume such a scheduler begins at its first step again, so the learning rate is wrong from there on.
    """
    names = [name for name, value in state.items() if isinstance(value, Optimizer) and _has_scheduler(value)]
    if not names or any(_holds_scheduler(value) for value in state.values()):
        return None
    return TrainingWarning(
        "scheduler_not_saved",
        f"{names[0]!r} has a learning-rate scheduler, which is not in the state of session.steps: after a resume it "
        "begins again",
        'put the scheduler into the state: state["scheduler"] = scheduler',
    )


def _has_scheduler(optimizer: Optimizer) -> bool:
    # torch's schedulers replace `step` of their optimizer, in order to warn when they are called before it.
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def _holds_scheduler(value: Any) -> bool:
    """Return whether ``value`` is a scheduler, or an object or a list that holds one."""
    parts: Iterable[Any] = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    return isinstance(value, LRScheduler) or any(isinstance(part, LRScheduler) for part in parts)
