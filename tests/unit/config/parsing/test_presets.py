"""Presets, compared with the published numbers of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.model import ModelSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.parsing.presets import PRESETS, apply_preset
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError


def build_model(**model: object) -> ModelSpec:
    return build(apply_preset({"model": model}), Recipe, "recipe").model


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("125m", 0.1235e9),
        ("llama3.2-1b", 1.236e9),
        ("llama3.1-8b", 8.030e9),
        ("llama3.1-70b", 70.554e9),
        ("llama3.1-405b", 405.85e9),
    ],
)
def test_preset_has_published_parameter_count(preset: str, published: float) -> None:
    assert build_model(preset=preset).parameters() == pytest.approx(published, rel=1e-3)


def test_tiny_preset_is_the_default() -> None:
    assert build_model(preset="tiny") == ModelSpec(preset="tiny") and build_model() == ModelSpec()


def test_recipe_overrides_preset() -> None:
    model = build_model(preset="llama3.1-8b", layers=2, rope_theta=10_000.0)
    assert (model.layers, model.rope_theta) == (2, 10_000.0)
    assert (model.dim, model.kv_heads) == (4096, 8)


def test_every_preset_is_valid() -> None:
    for name in PRESETS:
        assert build_model(preset=name).parameters() > 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"preset": "llama3-8b"}, "did you mean llama3.1-8b"),
        ({"preset": "tiny", "kind": "convnet"}, "remove preset"),
        ({"preset": "tiny", "entry": "a:b"}, "remove preset"),
        ({"entry": "a.b"}, "package.module:function"),
        ({"entry": "a/b.py:c"}, "package.module:function"),
        ({"entry": "a:b", "kind": "convnet"}, "remove kind"),
        ({"args": {"x": 1}}, "args needs an entry"),
        ({"kind": "resnet"}, "resnet"),
        ({"convnet": {"width": 20}}, "not divisible by groups = 8"),
        ({"convnet": {"blocks": []}}, "at least one"),
        ({"convnet": {"depth": 3}}, "unknown key 'model.convnet.depth'"),
        ({"two_tower": {"temperature": 0.0}}, "between 0.01 and 10"),
    ],
)
def test_invalid_preset_use_is_refused(model: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_model(**model)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("document", "seq_len"),
    [
        ({"model": {"preset": "llama3.1-8b"}}, 8192),
        ({"model": {"preset": "llama3.1-8b"}, "data": {"seq_len": 512}}, 512),
        ({"model": {"preset": "llama3.1-8b", "max_seq_len": 4096}, "data": {"validation": 0.1}}, 4096),
        ({"model": {"preset": "llama3.1-8b", "kind": "two-tower"}}, 256),
        ({"model": {"preset": "tiny"}}, 256),
        ({"model": {"dim": 4096}}, 256),
    ],
)
def test_preset_sets_seq_len(document: dict[str, Any], seq_len: int) -> None:
    assert build(apply_preset(document), Recipe, "x.toml").data.seq_len == seq_len
