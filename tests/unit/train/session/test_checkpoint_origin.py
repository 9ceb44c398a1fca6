"""Description of the run in the manifest of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import clustertrain
from clustertrain import fsio
from clustertrain.config.job import RunSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.run.run_dir import RunDir
from clustertrain.train.session.checkpointing_config import build_about
from tests.unit.train.single_process import ALONE

SECRET = "T000-B000-s3cret"


@pytest.mark.parametrize("url", ["https://hooks.example.org:8443/services/{}", "http://me:{}@[::1]/x?token={}"])
def test_alert_secrets_are_not_in_the_manifest(url: str) -> None:
    alerts = {"webhook": url.replace("{}", SECRET), "command": ["notify", "--token", SECRET], "idle_min": 3.0}
    spec = build({"recipe": {"telemetry": {"alerts": alerts}}}, RunSpec, "spec.toml")
    about = build_about(dataclasses.replace(ALONE, spec=spec))
    assert SECRET not in json.dumps(about)
    assert about["recipe"]["telemetry"]["alerts"]["command"][0] == "notify"
    recipe = build(about["recipe"], Recipe, "manifest.json")  # as `checkpoint export` does
    assert recipe.telemetry.alerts.idle_min == 3.0
    host = "https://hooks.example.org:8443/" if "hooks" in url else "http://[::1]/"
    assert recipe.telemetry.alerts.webhook.startswith(host)
    assert recipe.model == spec.recipe.model


def test_recipe_without_alerts_is_stored_completely() -> None:
    spec = build({}, RunSpec, "spec.toml")
    assert build(build_about(dataclasses.replace(ALONE, spec=spec))["recipe"], Recipe, "manifest.json") == spec.recipe


def test_code_version_is_in_the_manifest(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    git = {"commit": "0123abc", "dirty": False}
    fsio.write_json(run.record, {"git": git})
    about = build_about(dataclasses.replace(ALONE, run=run))
    assert about["git"] == git and about["clustertrain"] == clustertrain.__version__
