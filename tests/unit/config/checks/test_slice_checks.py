"""Slices in a recipe that its validation data cannot have."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.checks.cross_checks import check_contract
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError

VALIDATED, IMAGES, PAIRS = {"validation": 0.1}, {"kind": "convnet"}, {"kind": "two-tower"}
TEN = "class-0, class-1, .*class-8, class-9"


def recipe(slices: Any = (), **tables: Any) -> Recipe:
    tables["data"] = {**VALIDATED, **tables.get("data", {})}
    tables["contract"] = {"slices": list(slices), **tables.get("contract", {})}
    built = build(tables, Recipe, "recipe.toml")
    check_contract(built, "recipe.toml")
    return built


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"slices": ["class-88"], "model": IMAGES}, f"contract.slices: .* no slice 'class-88'; it has {TEN}$"),
        ({"slices": ["class-88"], "model": IMAGES, "data": {"path": "digits"}}, f"it has {TEN}$"),
        (
            {"slices": ["class-3"], "model": {**IMAGES, "convnet": {"classes": 3}}, "data": {"path": "a.npz"}},
            "it has class-0, class-1, class-2$",
        ),
        (
            {"slices": ["x"], "model": {**IMAGES, "convnet": {"classes": 50}}, "data": {"path": "a.npz"}},
            "class-19 and 30 more$",
        ),
        ({"slices": ["night"]}, "no slice 'night'; it has none"),
        ({"slices": ["class-1"], "model": PAIRS}, "no slice 'class-1'; it has none"),
        (
            {"slices": ["class-1"], "model": {**PAIRS, "vocab_size": 17}, "data": {"path": "digits", "seq_len": 32}},
            "it has none",
        ),
        (
            {"contract": {"metric": "validation_loss/night"}},
            "contract.metric = 'validation_loss/night': .* it has none",
        ),
        ({"checkpoint": {"keep_best": 1, "best": "validation_loss/night"}}, "checkpoint.best = .* it has none"),
        (
            {"slices": ["class-1"], "contract": {"metric": "validation_accuracy/class-2"}, "model": IMAGES},
            r"only contract.slices = \['class-1'\] are reported: add 'class-2' there",
        ),
    ],
)
def test_unknown_slice_lists_available_ones(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**tables)


@pytest.mark.parametrize(
    "tables",
    [
        {"slices": ["class-9"], "model": IMAGES, "contract": {"metric": "validation_accuracy/class-9"}},
        {"slices": ["night"], "model": {"entry": "a:b"}, "data": {"kind": "custom", "entry": "c:d"}},
        {"slices": ["cats"], "model": IMAGES, "data": {"path": "folder"}},
    ],
)
def test_possible_slice_is_accepted(tables: dict[str, Any]) -> None:
    recipe(**tables)
