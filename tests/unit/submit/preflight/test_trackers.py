"""Checks of [tracking] at submission."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.config.tracking import TrackingSpec
from clustertrain.errors import ConfigError
from clustertrain.submit.preflight import trackers


def test_missing_tracker_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec = TrackingSpec(trackers=("mlflow",))
    with pytest.raises(ConfigError, match=r"mlflow is not installed\n  fix: pip install 'clustertrain\[mlflow\]'"):
        trackers.check_trackers(spec, sys.executable, {})
    assert trackers.check_trackers(spec, "/opt/cluster/python", {}) == []


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
    notes = trackers.check_trackers(spec, sys.executable, environ)
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
