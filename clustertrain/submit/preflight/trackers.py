"""Checks of the trackers that a recipe names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from clustertrain import extras
from clustertrain.config.checkpoint import KEEP_BEST_AUTO
from clustertrain.config.job import RunSpec
from clustertrain.config.tracking import TrackingSpec
from clustertrain.errors import ConfigError
from clustertrain.submit.program.job_python import Interpreter


def check_run_trackers(spec: RunSpec, python: Interpreter) -> list[str]:
    """Return notes on the trackers of ``spec``, with the environment that the job will have.

    Raises:
        UnsuitableEnvironment: a package is known to be missing.
        ConfigError: the best model is to be logged, and no checkpoint will be the best.
    """
    recipe = spec.recipe
    # A script decides itself whether it evaluates.
    ranks_none = (
        recipe.checkpoint.keep_best == KEEP_BEST_AUTO and spec.script is None and not recipe.data.has_validation
    )
    if recipe.tracking.log_model == "best" and (recipe.checkpoint.keep_best == 0 or ranks_none):
        reason = "keep_best = 0" if recipe.checkpoint.keep_best == 0 else "the run does not evaluate"
        raise ConfigError(
            f"tracking.log_model = 'best': no checkpoint will be the best, because {reason}",
            fix="set checkpoint.keep_best = 1, or tracking.log_model = 'last'",
        )
    return check_trackers(recipe.tracking, python, {**os.environ, **spec.env})


def check_trackers(spec: TrackingSpec, python: Interpreter, environ: Mapping[str, str]) -> list[str]:
    """Return notes on ``[tracking]`` for a job whose agents run with ``python``, and with the environment ``environ``.

    Raises:
        UnsuitableEnvironment: a package is known to be missing.
    """
    notes = []
    for name in spec.trackers:
        if python.lacks(name):
            raise extras.missing(name, f"tracking.trackers = {name!r}", python.path, alternative="leave it out")
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
