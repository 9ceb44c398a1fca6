from __future__ import annotations

import sys
from typing import Any

import pytest

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.submit.preflight import packages


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"optim": {"name": "lion"}}, "optim.name = 'lion': the package pytorch_optimizer"),
        ({"optim": {"name": "adamw8bit"}}, "the package torchao"),
        ({"model": {"kind": "convnet"}, "data": {"augment": {"flip": True}}}, "data.augment: the package kornia"),
        ({"model": {"kind": "convnet"}, "data": {"path": "digits"}}, "data.path = 'digits': the package sklearn"),
    ],
)
def test_missing_package_is_refused(tables: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = build(tables, Recipe, "recipe.toml")
    monkeypatch.setattr(packages, "is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=message) as caught:
        packages.check_packages(recipe, sys.executable)
    assert "pip install 'clustertrain[" in str(caught.value.fix)
    packages.check_packages(recipe, "/elsewhere/python")
    packages.check_packages(Recipe(), sys.executable)


def test_installed_packages_pass() -> None:
    assert packages.is_installed("click") and not packages.is_installed("no_such_package_anywhere")
