"""The trackers by name."""

from __future__ import annotations

from typing import Any

from clustertrain.run.run_dir import RunDir
from clustertrain.tracking.mlflow import MLflow
from clustertrain.tracking.tensorboard import TensorBoard
from clustertrain.tracking.tracker import Tracker
from clustertrain.tracking.wandb import Wandb


def build_tracker(name: str, run: RunDir, metadata: Any) -> Tracker:
    """Return the tracker called ``name``.

    Raises:
        ConfigError: its package is not installed.
    """
    if name == "tensorboard":
        return TensorBoard(run, metadata)
    return Wandb(run, metadata) if name == "wandb" else MLflow(run, metadata)
