"""A loop of a program's own with an ``Accelerator``: its steps, the agreed stop with ``save_state``, and the resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clustertrain import attach as attach_loop

if TYPE_CHECKING:
    from clustertrain.rank_hooks.clustertrain_hooks.attach import Job

__all__ = ["attach"]


def attach(accelerator: Any, *, every: int = 0, keep: int = 2, folder: str = "") -> Job:
    """Return the job of this process, as ``clustertrain.attach`` with ``save_state`` and ``load_state``.

    Args:
        accelerator: an ``accelerate.Accelerator`` whose objects are prepared before ``job.steps`` or ``job.resume``.
        every: steps between two checkpoints; 0: only when the job has to stop.
        keep: newest checkpoints to keep.
        folder: where checkpoints are written. Empty: ``program-checkpoints`` in the run folder; outside a run, in the
            current folder.

    Raises:
        ValueError: ``every`` is negative, ``keep`` is less than 1, or the Accelerator names checkpoints itself.
    """
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "attach: automatic_checkpoint_naming of the ProjectConfiguration must be False: a job names its "
            "checkpoints by their steps"
        )
    return attach_loop(save=accelerator.save_state, load=accelerator.load_state, every=every, keep=keep, folder=folder)
