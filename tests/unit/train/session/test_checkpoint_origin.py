"""What a checkpoint's index says of the run that made it."""

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
from tests.unit.train.alone import ALONE

SECRET = "T000-B000-s3cret"


@pytest.mark.parametrize("url", ["https://hooks.example.org:8443/services/{}", "http://me:{}@[::1]/x?token={}"])
def test_the_secrets_of_the_alerts_stay_in_the_spec(url: str) -> None:
    alerts = {"webhook": url.replace("{}", SECRET), "command": ["notify", "--token", SECRET], "idle_min": 3.0}
    spec = build({"recipe": {"telemetry": {"alerts": alerts}}}, RunSpec, "spec.toml")
    found = build_about(dataclasses.replace(ALONE, spec=spec))
    assert SECRET not in json.dumps(found)
    assert found["recipe"]["telemetry"]["alerts"]["command"][0] == "notify"
    again = build(found["recipe"], Recipe, "manifest.json")  # `checkpoint export` does
    assert again.telemetry.alerts.idle_min == 3.0
    host = "https://hooks.example.org:8443/" if "hooks" in url else "http://[::1]/"
    assert again.telemetry.alerts.webhook.startswith(host)
    assert again.model == spec.recipe.model


def test_without_alerts_it_is_the_whole_recipe() -> None:
    spec = build({}, RunSpec, "spec.toml")
    assert build(build_about(dataclasses.replace(ALONE, spec=spec))["recipe"], Recipe, "manifest.json") == spec.recipe


def test_it_says_of_which_code_it_is(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    git = {"commit": "0123abc", "dirty": False}
    fsio.write_json(run.record, {"git": git})
    found = build_about(dataclasses.replace(ALONE, run=run))
    assert found["git"] == git and found["clustertrain"] == clustertrain.__version__
