"""The [parallel] table."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError


def table(**values: Any) -> ParallelSpec:
    return build({"parallel": values}, Recipe, "recipe.toml").parallel


@pytest.mark.parametrize(
    ("values", "stages"),
    [
        ({}, 1),
        ({"schedule": "gpipe"}, 1),
        ({"schedule": "interleaved"}, 2),
        ({"schedule": "interleaved", "virtual_stages": 4}, 4),
        ({"schedule": "zero-bubble", "virtual_stages": 1}, 1),
        ({"schedule": "zbv"}, 2),
    ],
)
def test_stages_per_rank(values: dict[str, Any], stages: int) -> None:
    assert table(**values).stages_per_rank == stages


def test_unknown_choice_lists_nearest_first() -> None:
    with pytest.raises(ConfigError) as e:
        table(schedule="zb")
    assert e.value.fix == "use one of zbv, 1f1b, zero-bubble, auto, gpipe, interleaved"
    with pytest.raises(ConfigError, match=r"(?s)train.precision.*use one of bf16, fp16,"):
        build({"train": {"precision": "bfloat16"}}, Recipe, "recipe.toml")
    with pytest.raises(ConfigError, match=r'change train.steps = "many"'):
        build({"train": {"steps": "many"}}, Recipe, "recipe.toml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedul": "1f1b"}, "did you mean parallel.schedule"),
        ({"schedule": "1f2b"}, "parallel.schedule"),
        ({"schedule": "1f1b", "virtual_stages": 2}, "supports one stage per rank"),
        ({"schedule": "zbv", "virtual_stages": 3}, "supports two stages per rank"),
        ({"virtual_stages": -1}, "must be 0"),
        ({"async_tp": True}, "needs compile = true"),
        ({"bucket_mib": 0}, "bucket_mib = 0"),
        ({"offload": "yes"}, "parallel.offload"),
    ],
)
def test_invalid_value_names_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        table(**values)
    assert message in str(e.value)


@pytest.mark.parametrize("value", [0, 1, -2, True, 2.5, "2"])
def test_bad_interval_of_recomputed_layers_is_refused(value: object) -> None:
    assert table(activation_checkpointing=3).activation_checkpointing == 3
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        table(activation_checkpointing=value)
