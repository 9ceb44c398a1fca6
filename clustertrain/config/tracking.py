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
    offline: bool = False
    """Keep everything in the run folder, for ``wandb sync``. W&B only."""

    def __post_init__(self) -> None:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers = {list(self.trackers)}: contains a duplicate")
        if "@" in urlsplit(self.uri).netloc:
            raise ValueError(
                "uri: contains a user name or password, which the run would keep; set them in the environment, as "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI as a whole"
            )
