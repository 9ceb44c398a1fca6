"""Adapters against the other tables and the layers of the built-in models."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.checks import adapter_checks
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError

SMALL = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1}


def recipe(adapter: dict[str, Any], **tables: Any) -> Recipe:
    return build({"model": SMALL, **tables, "adapter": {"kind": "lora", **adapter}}, Recipe, "recipe.toml")


def test_default_patterns_select_all_matrices_of_the_layers() -> None:
    targets = adapter_checks.find_targets(recipe({}))
    assert len(targets) == 14 and targets["layers.1.attention.k"] == (16, 32)
    towers = adapter_checks.find_targets(recipe({}, model={**SMALL, "kind": "two-tower"}))
    assert len(towers) == 28 and "second.layers.0.ffn.up" in towers


@pytest.mark.parametrize("tied", [False, True])
def test_head_is_a_layer_unless_it_is_tied(tied: bool) -> None:
    layers = adapter_checks.list_linear_layers(recipe({}, model={**SMALL, "tie_embeddings": tied}).model)
    assert ("head" in layers) != tied and "embed" not in layers


@pytest.mark.parametrize(
    ("adapter", "tables", "message"),
    [
        (
            {"target_modules": ["*.wq"]},
            {},
            r"no Linear layer of the decoder matches '\*.wq': its Linear layers",
        ),
        ({"target_modules": ["*.q", "embed"]}, {}, "matches 'embed'"),
        (
            {"rank": 17},
            {},
            "rank = 17 exceeds the smaller side of layers.0.attention.k, a matrix of 16 x 32",
        ),
        ({}, {"model": {"kind": "convnet"}}, "of the convnet matches .*: its Linear layers are head"),
        ({}, {"optim": {"freeze": ["embed"]}}, "optim.freeze and adapter.kind = 'lora'"),
        ({}, {"optim": {"unfreeze": [{"step": 3, "modules": ["embed"]}]}}, "optim.unfreeze and adapter.kind"),
        ({}, {"train": {"precision": "fp8"}}, "train.precision = 'fp8' and adapter.kind"),
        (
            {"target_modules": ["head"], "base_precision": "nf4"},
            {"model": {"kind": "convnet"}},
            "the layers of a convnet are convolutions",
        ),
        ({"rank": 0}, {}, "adapter.rank = 0: must be greater than 0"),
        ({"alpha": 0}, {}, "adapter.alpha = 0.0: must be greater than 0"),
        ({"target_modules": [""]}, {}, "adapter.target_modules: must name at least one module"),
    ],
)
def test_contradictions_are_refused(adapter: dict[str, Any], tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(adapter, **tables)


def test_model_of_the_users_own_is_checked_in_the_ranks() -> None:
    assert recipe({"rank": 4000, "target_modules": ["any"]}, model={"entry": "mine:build"}).adapter.rank == 4000
