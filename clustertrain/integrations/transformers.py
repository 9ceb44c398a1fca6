"""A callback for ``transformers.Trainer``: steps, the agreed stop with the Trainer's own save, and the resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import TrainerCallback

from clustertrain import import_hooks

if TYPE_CHECKING:
    from clustertrain.rank_hooks.clustertrain_hooks.transformers_trainer import TrainReports
else:
    TrainReports = import_hooks("transformers_trainer").TrainReports

__all__ = ["Callback"]


class Callback(TrainReports, TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Report steps and saves to clustertrain, and save and stop at the step on which all ranks have agreed.

    Put it last in the Trainer's list of callbacks, and resume with
    ``trainer.train(resume_from_checkpoint=callback.find_checkpoint())``. With the hooks, which do all that in a Trainer
    without it, it acts in their place. Outside a run it does nothing.
    """
