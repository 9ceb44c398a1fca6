"""Checks of [tracking] at submission."""

from __future__ import annotations

import pytest

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.config.tracking import Tracker, TrackingSpec
from clustertrain.errors import ConfigError
from clustertrain.submit.job_python import Interpreter
from clustertrain.submit.preflight import trackers

UNKNOWN = Interpreter("/opt/cluster/python")


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_missing_tracker_package_is_refused(name: Tracker) -> None:
    spec = TrackingSpec(trackers=(name,), offline=True)
    message = rf"{name} is not installed for /env/python\n  fix: /env/python -m pip install 'clustertrain\[{name}\]'"
    with pytest.raises(ConfigError, match=message):
        trackers.check_trackers(spec, Interpreter("/env/python", (3, 12), {}), {})
    assert trackers.check_trackers(spec, UNKNOWN, {}) == []


@pytest.mark.parametrize(
    ("spec", "environ", "expected"),
    [
        (TrackingSpec(trackers=("wandb",)), {}, ["no WANDB_API_KEY"]),
        (TrackingSpec(trackers=("wandb",)), {"WANDB_API_KEY": "k"}, []),
        (TrackingSpec(trackers=("wandb",), offline=True), {}, []),
        (TrackingSpec(trackers=("mlflow",), uri="file:///runs"), {}, ["use sqlite:///FILE"]),
        (TrackingSpec(trackers=("mlflow",)), {"MLFLOW_TRACKING_URI": "mlruns"}, ["use sqlite:///FILE"]),
        (TrackingSpec(trackers=("mlflow",), uri="https://mlflow.example"), {}, []),
        (TrackingSpec(), {"MLFLOW_TRACKING_URI": "mlruns"}, []),
    ],
)
def test_notes_on_trackers(spec: TrackingSpec, environ: dict[str, str], expected: list[str]) -> None:
    notes = trackers.check_trackers(spec, UNKNOWN, environ)
    assert len(notes) == len(expected) and all(a in b for a, b in zip(expected, notes, strict=True))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"trackers": ["mlflow"], "uri": "https://me:hunter2@mlflow.example"}, "set them in the environment"),
        ({"trackers": ["tensorboard", "tensorboard"]}, "contains a duplicate"),
        ({"trackers": ["neptune"]}, "tracking.trackers"),
    ],
)
def test_bad_tracking_table_is_refused(table: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as e:
        build({"tracking": table}, Recipe, "recipe.toml")
    assert expected in str(e.value) and "hunter2" not in str(e.value)
