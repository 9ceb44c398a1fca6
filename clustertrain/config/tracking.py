"""The ``[tracking]`` table: where the run's scalars go besides its own folder."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec

Tracker = Literal["tensorboard", "wandb", "mlflow"]


class TrackingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A process beside the ranks reads the rows and hands them on; a tracker that fails never ends a run."""

    to: tuple[Tracker, ...] = ()
    project: str = ""  # wandb's project, MLflow's experiment; "": the run's name
    uri: str = ""  # MLflow's tracking URI; "": what the environment says, else a database in the run's folder
    offline: bool = False  # wandb: keep everything in the run's folder, for `wandb sync`

    def __post_init__(self) -> None:
        if len(set(self.to)) < len(self.to):
            raise ValueError(f"to = {list(self.to)}: one is named twice")
        if "@" in urlsplit(self.uri).netloc:
            raise ValueError(
                "uri: a name or password in it would be kept with the run; give them in the environment, as "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI as a whole"
            )
