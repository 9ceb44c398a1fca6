"""Keys that are set but never read are refused. tests/unit/train/test_recipe_keys_are_read.py covers the others."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.checks.unused_keys import check_unused_keys, find_unused_keys
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError

IMAGES, PAIRS, VALIDATED = {"kind": "convnet"}, {"kind": "two-tower"}, {"validation": 0.1}


def check_recipe(**tables: Any) -> None:
    recipe = build(tables, Recipe, "recipe.toml")
    check_unused_keys(find_unused_keys(tables, recipe), recipe, "recipe.toml")


@pytest.mark.parametrize(
    ("tables", "message", "fix"),
    [
        (
            {"schedule": {"milestones": [10, 20], "gamma": 0.2}},
            'schedule.milestones and schedule.gamma have no effect with schedule.kind = "cosine"',
            'remove them, or set schedule.kind = "step"',
        ),
        (
            {"schedule": {"kind": "one-cycle", "warmup_steps": 10}},
            'warmup_steps has .* schedule.kind = "one-cycle"',
            "",
        ),
        ({"schedule": {"kind": "constant", "floor": 0.0}}, "schedule.floor has", ""),
        ({"schedule": {"patience": 3}}, "schedule.patience has", 'set schedule.kind = "plateau"'),
        ({"optim": {"momentum": 0.9}}, 'optim.momentum has no effect with optim.name = "adamw"', '"sgd" or "lars"'),
        ({"optim": {"name": "lars", "nesterov": True}}, "optim.nesterov has", 'set optim.name = "sgd"'),
        ({"optim": {"name": "sgd", "betas": [0.9, 0.95]}}, 'optim.betas has .* "sgd"', '"adamw" or '),
        ({"optim": {"name": "lion", "eps": 1e-6}}, "optim.eps has", ""),
        ({"optim": {"clip_value": 0.5}}, 'clip_value has no effect with optim.clip = "norm"', 'optim.clip = "value"'),
        ({"optim": {"clip": "value", "clip_norm": 2.0}}, "optim.clip_norm has", '"norm" or "adaptive"'),
        ({"objective": {"delta": 2.0}}, 'delta has no effect with objective.kind = "cross-entropy"', '= "huber"'),
        ({"objective": {"temperature": 0.2}}, "objective.temperature has", '"nt-xent"'),
        (
            {"objective": {"temperature": 0.2}, "model": PAIRS},
            "objective.temperature has",
            "model.two_tower.temperature",
        ),
        (
            {"objective": {"kind": "mse", "label_smoothing": 0.1}, "data": {"kind": "custom", "entry": "a:b"}},
            'label_smoothing has no effect with objective.kind = "mse"',
            '"cross-entropy"',
        ),
        ({"model": {**IMAGES, "dropout": 0.1}}, 'model.dropout has no effect with model.kind = "convnet"', '"decoder"'),
        ({"model": {"convnet": {"classes": 3}}}, "model.convnet.classes has", '"convnet"'),
        ({"model": {**PAIRS, "tie_embeddings": True}}, "tie_embeddings has", '"decoder"'),
        ({"model": {"entry": "a:b", "dim": 64}}, 'model.dim has no effect with model.entry = "a:b"', "model.args"),
        ({"data": {"image_size": 64}}, 'data.image_size has no effect with data.kind = "text"', '"images"'),
        ({"data": {"path": "digits", "image_size": 8}, "model": IMAGES}, "data.path = 'digits'", "to a folder"),
        ({"data": {"seq_len": 64}, "model": IMAGES}, 'seq_len has no effect with data.kind = "images"', '"tokens"'),
        ({"data": {"pattern": "*.txt"}, "model": IMAGES}, "data.pattern has", '"text" or "pairs"'),
        ({"data": {"pack": True}}, "data.pack has", '"tokens"'),
        ({"data": {"attention": "document"}}, 'data.attention has no effect with data.kind = "text"', '"tokens"'),
        (
            {"data": {"kind": "tokens", "path": "/shards", "attention": "document"}},
            "data.attention has no effect with data.pack = false",
            "set data.pack = true",
        ),
        ({"data": {"tokenizer": "t"}}, 'data.tokenizer has no effect with data.kind = "text"', "data tokenize"),
        ({"data": {"chat_template": "t"}}, "data.chat_template has", '"chat"'),
        ({"data": {"augment": {"flip": True}}}, "data.augment.flip has", '"images"'),
        (
            {"data": {"prefetch": 4, "workers": 0}},
            "data.prefetch has no effect with data.workers = 0",
            "data.workers to 1",
        ),
        ({"evaluation": {"every": 10, "patience": 2}}, "every and .*patience have", "data.validation or"),
        (
            {"contract": {"on_budget_spent": "warn"}},
            "on_budget_spent has no effect with no budget",
            "contract.gpu_hours",
        ),
        ({"stability": {"spike": "off", "spike_window": 64}}, 'stability.spike = "off"', '"warn" or "skip"'),
        ({"stability": {"max_roll_backs": 2}}, "max_roll_backs has", "roll-back"),
        (
            {"tracking": {"project": "x"}},
            r"tracking.project has no effect with tracking.trackers = \[\]",
            r'["wandb"] or [',
        ),
        ({"tracking": {"trackers": ["tensorboard"], "offline": True}}, r'trackers = \["tensorboard"\]', '["wandb"]'),
        ({"tracking": {"uri": "sqlite:///x"}}, "tracking.uri has", '["mlflow"]'),
        ({"telemetry": {"enabled": False, "interval_s": 2.0}}, "telemetry.interval_s has", "telemetry.enabled = true"),
        ({"telemetry": {"prometheus": {"address": "0.0.0.0"}}}, "prometheus.address has", "set that port"),
    ],
)
def test_unused_key_is_refused_with_reason(tables: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"^recipe.toml: .*{message}") as caught:
        check_recipe(**tables)
    assert fix in str(caught.value.fix) and str(caught.value.fix).startswith("remove ")


@pytest.mark.parametrize(
    "tables",
    [
        {"optim": {"nesterov": False}, "data": {"pack": False, "augment": {"crop": 0}}, "tracking": {"project": ""}},
        {"schedule": {"cooldown_steps": -1, "milestones": []}, "objective": {"label_smoothing": 0.0}},
        {"telemetry": {"enabled": False, "alerts": {"idle_min": 0}}},
        {"optim": {"name": "sgd", "eps": 1e-8, "clip": "value", "clip_norm": 0}, "data": {"workers": 0, "prefetch": 2}},
        {
            "objective": {"temperature": 0.1},
            "contract": {"on_budget_spent": "stop"},
            "model": {"convnet": {"classes": 10}},
        },
    ],
)
def test_noop_value_of_unused_key_is_accepted(tables: dict[str, Any]) -> None:
    check_recipe(**tables)


@pytest.mark.parametrize(
    "tables",
    [
        {"objective": {"temperature": 0.2, "kind": "nt-xent"}, "model": {"entry": "a:b", "args": {"dim": 3}}},
        {"optim": {"clip": "adaptive", "clip_norm": 0.5, "clip_quantile": 0.9, "lr_scale": {"head": 2.0}}},
        {"data": {"kind": "custom", "entry": "a:b", "args": {"pattern": "x"}, "seq_len": 64}},
        {"data": {"path": "digits", "validation_path": "mine", "image_size": 8}, "model": IMAGES},
        {"data": {**VALIDATED, "workers": -1, "prefetch": 4}, "evaluation": {"every": 5}},
        {"contract": {"gpu_hours": 2.0, "on_budget_spent": "warn"}, "stability": {"spike_window": 64}},
        {"tracking": {"trackers": ["mlflow"], "project": "x", "uri": "sqlite:///x"}},
        {"model": {"preset": "125m", "layers": 2}},
    ],
)
def test_used_key_is_accepted(tables: dict[str, Any]) -> None:
    check_recipe(**tables)
