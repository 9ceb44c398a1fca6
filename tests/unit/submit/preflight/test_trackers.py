"""Checks of [tracking] at submission."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.job import JobSpec, RunSpec, ScriptSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.config.tracking import Tracker, TrackingSpec
from clustertrain.errors import ConfigError
from clustertrain.submit.preflight import trackers
from clustertrain.submit.program.job_python import Interpreter

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
    ("tables", "script", "reason"),
    [
        ({"data": {"validation": 0.1}}, None, None),
        ({"data": {"validation": 0.1}, "checkpoint": {"keep_best": 0}}, None, "keep_best = 0"),
        ({}, None, "the run does not evaluate"),
        ({"checkpoint": {"keep_best": 1}}, None, None),  # by the training loss
        ({}, ScriptSpec(path="train.py", cwd="/home/me"), None),
        ({"checkpoint": {"keep_best": 0}}, ScriptSpec(path="train.py", cwd="/home/me"), "keep_best = 0"),
    ],
)
def test_best_model_needs_a_best_checkpoint(
    tables: dict[str, Any], script: ScriptSpec | None, reason: str | None
) -> None:
    recipe = build({"tracking": {"trackers": ["mlflow"], "log_model": "best"}, **tables}, Recipe, "recipe.toml")
    spec = RunSpec(recipe=recipe, job=JobSpec(), script=script)
    if reason is None:
        assert trackers.check_run_trackers(spec, UNKNOWN) == []
        return
    with pytest.raises(ConfigError, match=rf"tracking.log_model = 'best': no checkpoint .*because {reason}"):
        trackers.check_run_trackers(spec, UNKNOWN)


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
