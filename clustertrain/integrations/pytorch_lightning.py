"""A callback for the Trainer of ``pytorch_lightning``: steps, the agreed stop with a save, and the resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytorch_lightning import Callback as _Base

from clustertrain import import_hooks

if TYPE_CHECKING:
    from clustertrain.rank_hooks.clustertrain_hooks.lightning_trainer import FitReports
else:
    FitReports = import_hooks("lightning_trainer").FitReports

__all__ = ["Callback"]


class Callback(FitReports, _Base):  # type: ignore[misc,unused-ignore]
    """Report steps and saves to clustertrain, and save and stop at the step on which all ranks have agreed.

    Give it to the Trainer, and resume with ``trainer.fit(model, ckpt_path=callback.find_checkpoint())``. With the
    hooks, which do all that in a Trainer without it, it acts in their place. Outside a run it does nothing.
    """

    package = "pytorch_lightning"
