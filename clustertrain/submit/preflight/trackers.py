"""Checks of the trackers that a recipe names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

from clustertrain.config.job import RunSpec
from clustertrain.config.tracking import TrackingSpec
from clustertrain.errors import ConfigError
from clustertrain.submit.preflight.packages import is_installed

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def check_run_trackers(spec: RunSpec, python: str) -> list[str]:
    """Return notes on the trackers of ``spec``, with the environment that the job will have.

    Raises:
        ConfigError: a package is missing.
    """
    return check_trackers(spec.recipe.tracking, python, {**os.environ, **spec.env})


def check_trackers(spec: TrackingSpec, python: str, environ: Mapping[str, str]) -> list[str]:
    """Return notes on ``[tracking]`` for a job with the interpreter ``python`` and the environment ``environ``.

    Raises:
        ConfigError: a package is not installed for this interpreter, which the job uses too.
    """
    notes = []
    for name in spec.trackers:
        if python == sys.executable and not is_installed(_PACKAGES[name]):
            extra = "clustertrain" if name == "tensorboard" else f"clustertrain[{name}]"
            raise ConfigError(
                f"tracking.trackers = {name!r}: the package {_PACKAGES[name]} is not installed",
                fix=f"pip install '{extra}', or leave it out",
            )
    if (
        "wandb" in spec.trackers
        and not spec.offline
        and not environ.get("WANDB_API_KEY")
        and not environ.get("WANDB_MODE")
    ):
        notes.append(
            "tracking: no WANDB_API_KEY in the environment: without `wandb login` on the nodes the run stays offline"
        )
    uri = spec.uri or environ.get("MLFLOW_TRACKING_URI", "")
    if "mlflow" in spec.trackers and uri and urlsplit(uri).scheme in ("", "file"):
        notes.append(f"tracking.uri = {uri!r}: MLflow supports folder stores for old data only; use sqlite:///FILE")
    return notes
