"""Checks across the tables of a recipe."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.checks.cross_checks import check_contract
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError


def recipe(**tables: Any) -> Recipe:
    built = build(tables, Recipe, "recipe.toml")
    check_contract(built, "recipe.toml")
    return built


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"schedule": {"warmup_steps": 200}}, "warmup_steps = 200 is not less than train.steps = 200"),
        ({"schedule": {"kind": "wsd", "warmup_steps": 100, "cooldown_steps": 101}}, "exceed train.steps = 200"),
        (
            {"schedule": {"kind": "wsd", "cooldown_steps": 198}},
            "warmup_steps = 4 and cooldown_steps = 198 together exceed train.steps = 200",
        ),
        ({"schedule": {"kind": "step", "milestones": [50, 200]}}, "milestones = .*before train.steps = 200"),
        ({"schedule": {"kind": "plateau"}}, "plateau' follows a validation metric: set data.validation"),
        ({"optim": {"unfreeze": [{"step": 200, "modules": ["a"]}]}}, "unfreeze: step 200"),
        (
            {"optim": {"unfreeze": [{"step": 3, "modules": ["a"]}, {"step": 9, "modules": ["b", "a"]}]}},
            "unfreeze: 'a' is listed twice, for steps 3 and 9",
        ),
        ({"contract": {"metric": "validation_accuracy"}}, "metric = 'validation_accuracy'.*set data.validation"),
        (
            {"contract": {"metric": "validation_acuracy"}, "data": {"validation": 0.1}},
            "not produced by the evaluation: did you mean validation_accuracy",
        ),
        (
            {"contract": {"metric": "validation_top5"}, "data": {"validation": 0.1}},
            "metric = 'validation_top5': add 'top5' to evaluation.metrics",
        ),
        ({"contract": {"slices": ["a"]}}, "slices need validation data"),
        ({"contract": {"cost": 10.0}}, "no effect without gpu_hour_cost"),
        (
            {"contract": {"metric": "loss"}, "checkpoint": {"keep_best": 1, "best": "grad_norm"}},
            "metric = 'loss' and checkpoint.best = 'grad_norm': two metrics would decide",
        ),
        (
            {"contract": {"metric": "loss", "mode": "max"}, "checkpoint": {"keep_best": 1, "best_mode": "min"}},
            "mode = 'max' and checkpoint.best_mode = 'min' contradict each other for loss",
        ),
        ({"evaluation": {"metrics": ["recall_at_1"]}}, "'recall_at_1' is not available for objective.kind"),
        ({"data": {"kind": "images"}}, "a decoder trains on text or tokens or chat or custom"),
        ({"data": {"kind": "custom"}}, "kind = 'custom' requires entry"),
        ({"data": {"kind": "tokens"}}, "kind = 'tokens' needs data.path"),
        ({"data": {"path": "a", "validation_path": "a"}}, "validation_path = 'a' is the training data"),
        ({"data": {"validation_path": "stdlib"}}, "validation_path = 'stdlib' is the training data"),
        (
            {"model": {"kind": "convnet"}, "data": {"validation_path": "shapes"}},
            "validation_path = 'shapes' is the training data",
        ),
        ({"schedule": {"kind": "one-cycle", "rise": 1.0}}, "rise = 1.0 leaves no steps for the decay"),
        ({"data": {"validation": 0.1, "validation_path": "a"}}, "mutually exclusive"),
        ({"data": {"validation": 1.0}}, "validation = 1.0: must lie between 0 and 0.9"),
        ({"data": {"workers": -2}}, "workers = -2: must be 0"),
        ({"model": {"max_seq_len": 128}}, r"seq_len = 256 exceeds model\.max_seq_len = 128"),
        ({"model": {"max_seq_len": -1}}, "max_seq_len = -1: must be 0"),
        (
            {"model": {"kind": "two-tower"}, "data": {"path": "digits"}},
            "seq_len = 256: must be 32, the pixels of half a digit",
        ),
        (
            {"model": {"kind": "convnet"}, "data": {"augment": {"mixup": 0.2}}, "objective": {"kind": "mse"}},
            "augment.mixup mixes classes",
        ),
        ({"train": {"profile": "20:10"}}, "profile = '20:10': must be \"first:end\""),
        ({"optim": {"lr": 0.0}}, "lr = 0.0: must be greater than 0"),
        ({"optim": {"lr_scale": {"head": -1.0}}}, "lr_scale.head = -1.0: must be greater than 0"),
        ({"optim": {"nesterov": True, "momentum": 0.0}}, "nesterov needs a momentum"),
        ({"stability": {"spike_window": 4}}, "spike_window = 4: must be 16"),
    ],
)
def test_contradictory_tables_are_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**tables)


def test_defaults_follow_from_other_tables() -> None:
    text, images = recipe(), recipe(model={"kind": "convnet"})
    assert text.optim.resolve_betas(is_text=text.is_text) == (0.9, 0.95)
    assert images.optim.resolve_betas(is_text=images.is_text) == (0.9, 0.999)
    assert (text.deciding_metric, text.higher_is_better) == ("loss", False)
    images_with_validation = {"model": {"kind": "convnet"}, "data": {"validation": 0.1}}
    by_class = recipe(**images_with_validation, contract={"metric": "validation_accuracy/class-1"})
    assert by_class.higher_is_better
    assert recipe(data={"validation": 0.1}).deciding_metric == "validation_loss"
    assert text.evaluated_metrics == ("accuracy", "perplexity", "bits_per_token")
    assert recipe(model={"kind": "two-tower"}).evaluated_metrics == ("recall_at_1",)
    assert recipe(train={"steps": 500}).evaluation_interval == 50
    assert recipe(train={"profile": "10:20"}).profiled_steps == range(10, 20)


def test_best_mode_follows_from_contract() -> None:
    validated = {"validation": 0.1}
    assert recipe(data=validated).best_mode == "min"
    assert recipe(data=validated, contract={"metric": "validation_accuracy"}).best_mode == "max"
    assert recipe(contract={"metric": "loss", "mode": "max"}).best_mode == "max"
    best = {"keep_best": 1, "best": "validation_accuracy"}
    assert recipe(data=validated, checkpoint=best).best_mode == "max"
    assert recipe(data=validated, checkpoint={**best, "best_mode": "min"}).best_mode == "min"


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_available_metric_is_accepted(name: str) -> None:
    assert recipe(contract={"metric": name}).deciding_metric == name
    with pytest.raises(ConfigError, match=f"metric = '{name}' is a training metric, .*use validation_loss"):
        recipe(contract={"metric": name}, data={"validation": 0.1})
    recipe(checkpoint={"keep_best": 1, "best": name})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"contract": {"metric": "accuracy"}, "data": {"validation": 0.1}}, "did you mean validation_accuracy"),
        ({"contract": {"metric": "accuracy"}}, "did you mean validation_accuracy"),
        (
            {"contract": {"metric": "f1"}},
            "'f1' is not measured without validation data: known: grad_norm, loss",
        ),
        ({"contract": {"metric": "lossy"}}, "did you mean loss"),
        ({"contract": {"metric": "loss/night"}}, "did you mean validation_loss"),
        ({"contract": {"metric": "val_loss"}, "data": {"validation": 0.1}}, "did you mean validation_loss"),
        ({"contract": {"metric": "eval_loss"}, "data": {"validation": 0.1}}, "did you mean validation_loss"),
        ({"checkpoint": {"keep_best": 1, "best": "f1"}, "data": {"validation": 0.1}}, "checkpoint.best = 'f1' is not"),
        ({"objective": {"kind": "mse"}}, "a decoder on text is trained with cross-entropy"),
        (
            {"stability": {"on_divergence": "roll-back"}, "checkpoint": {"every": 5, "keep": 1}},
            "rolls back by up to 10 steps, but checkpoint.keep = 1 with every = 5",
        ),
        ({"stability": {"spike": "roll-back"}, "checkpoint": {"every": 200}}, "no checkpoint to return to"),
        ({"stability": {"slowdown": 5.0}}, "slowdown = 5.0: must lie between 0 and 1"),
        (
            {"schedule": {"kind": "plateau"}, "data": {"validation": 0.1}, "evaluation": {"every": 200}},
            "only the last of",
        ),
    ],
)
def test_unavailable_metric_is_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**tables)


@pytest.mark.parametrize(
    ("tables", "fix"),
    [
        ({"tracking": {"trackers": ["tensorbord"]}}, "use one of tensorboard, "),
        ({"evaluation": {"metrics": ["loss", "acc"]}}, "use one of "),
        ({"tracking": {"trackers": "tensorboard"}}, 'write tracking.trackers = ["tensorboard"]'),
        ({"contract": {"target": "prod"}}, "use one of production, "),
    ],
)
def test_invalid_choice_lists_valid_ones(tables: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(**tables)
    assert str(caught.value.fix).startswith(fix) and ", ," not in str(caught.value.fix)


def test_document_attention_of_a_convnet_and_predictions_of_dpo_are_refused() -> None:
    data = {"kind": "custom", "entry": "a:b", "attention": "document"}
    with pytest.raises(ConfigError, match="a convnet has no attention inside documents"):
        build({"model": {"kind": "convnet"}, "data": data}, Recipe, "r.toml")
    chat = {"kind": "chat", "path": "a", "tokenizer": "t", "validation": 0.1}
    tables = {"objective": {"kind": "dpo"}, "data": chat, "evaluation": {"save_predictions": 3}}
    with pytest.raises(ConfigError, match="save_predictions: DPO"):
        build(tables, Recipe, "r.toml")
