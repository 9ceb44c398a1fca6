"""Names of trackers -> trackers."""

from __future__ import annotations

from typing import Any

from clustertrain.run.run_dir import RunDir
from clustertrain.tracking.tracker import Tracker


def build_tracker(name: str, run: RunDir, metadata: Any) -> Tracker:
    """Return the tracker called ``name``.

    Raises:
        ConfigError: its package is not installed.
    """
    # Not at the top: each imports its library, and a run uses one or two.
    if name == "tensorboard":
        from clustertrain.tracking.tensorboard import TensorBoard

        return TensorBoard(run, metadata)
    if name == "wandb":
        from clustertrain.tracking.wandb import Wandb

        return Wandb(run, metadata)
    from clustertrain.tracking.mlflow import MLflow

    return MLflow(run, metadata)
