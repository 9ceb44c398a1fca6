from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.submit.preflight import packages
from clustertrain.submit.program.job_python import Interpreter

BASE = Interpreter("/env/bin/python", (3, 12), {"clustertrain": "0.1.0", "msgspec": "", "torch": "2.13.0"})
UNKNOWN = Interpreter("/elsewhere/python")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"optim": {"name": "lion"}}, "optim.name = 'lion': the package pytorch_optimizer"),
        ({"optim": {"name": "adamw8bit"}}, "the package torchao"),
        ({"model": {"kind": "convnet"}, "data": {"augment": {"flip": True}}}, "data.augment: the package kornia"),
        ({"model": {"kind": "convnet"}, "data": {"path": "digits"}}, "data.path = 'digits': the package sklearn"),
        ({"data": {"kind": "chat", "path": "a.jsonl", "tokenizer": "t"}}, "data.kind = 'chat': the package tokenizers"),
        ({"checkpoint": {"engine": "torchsnapshot"}}, "checkpoint.engine = 'torchsnapshot': the package torchsnapshot"),
    ],
)
def test_missing_package_is_refused(tables: dict[str, Any], message: str) -> None:
    recipe = build(tables, Recipe, "recipe.toml")
    with pytest.raises(UnsuitableEnvironment, match=message) as caught:
        packages.check_packages(recipe, BASE)
    assert "/env/bin/python -m pip install 'clustertrain[" in str(caught.value.fix)
    packages.check_packages(recipe, UNKNOWN)
    packages.check_packages(Recipe(), BASE)


def test_missing_package_of_the_agents_is_refused() -> None:
    recipe = build({"telemetry": {"prometheus": {"port": 9400}}}, Recipe, "recipe.toml")
    with pytest.raises(UnsuitableEnvironment, match=r"prometheus_client is not.*\n.*clustertrain\[prometheus\]"):
        packages.check_agent_packages(recipe, BASE)
    packages.check_agent_packages(recipe, UNKNOWN)
    packages.check_agent_packages(Recipe(), BASE)
