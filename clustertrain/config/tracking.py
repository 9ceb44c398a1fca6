"""The ``[tracking]`` table: external trackers that receive the run's scalars."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec

Tracker = Literal["tensorboard", "wandb", "mlflow"]


class TrackingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[tracking]`` table.

    A separate process reads the logged rows and uploads them; a failing tracker never ends a run.
    """

    trackers: tuple[Tracker, ...] = ()
    """Trackers to use. Empty: none."""
    project: str = ""
    """Project in W&B, experiment in MLflow. Empty: ``WANDB_PROJECT`` or ``MLFLOW_EXPERIMENT_NAME``, otherwise the run's
    name. Unused by TensorBoard."""
    uri: str = ""
    """MLflow tracking URI. Empty: ``MLFLOW_TRACKING_URI``, otherwise a database in the run folder. MLflow only."""
    log_model: Literal["none", "best", "last"] = "none"
    """Log the model of the best or the last checkpoint when the run completes: to MLflow as files of the run and a new
    version in the model registry, to W&B as an artifact. Named after ``project``, otherwise after the run."""
    offline: bool = False
    """Keep everything in the run folder, for ``wandb sync``. W&B only."""

    def __post_init__(self) -> None:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers = {list(self.trackers)}: contains a duplicate")
        if self.log_model != "none" and not {"wandb", "mlflow"} & {*self.trackers}:
            raise ValueError(
                f"log_model = {self.log_model!r}: only W&B and MLflow take models: add one to trackers, or remove it"
            )
        if "@" in urlsplit(self.uri).netloc:
            raise ValueError(
                "uri: contains a user name or password, which the run would keep; set them in the environment, as "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI as a whole"
            )
