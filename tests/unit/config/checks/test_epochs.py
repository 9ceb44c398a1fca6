"""Keys in epochs: the steps that they become, and their alternatives in steps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from clustertrain.config.checks import epochs
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError

VALIDATED = {"validation": 0.1}


def resolve(samples: int = 1000, batch: int = 32, **tables: Any) -> Recipe:
    return epochs.resolve_epochs(build(tables, Recipe, "recipe"), samples, batch)


def test_epochs_become_steps_that_cover_them() -> None:
    assert resolve(train={"epochs": 3}).train.steps == 94  # 3 x 1000 / 32 = 93.75
    assert resolve(train={"epochs": 0.1}, samples=30, batch=1).train.steps == 3
    assert resolve(train={"epochs": 1}, samples=5, batch=32).train.steps == 1


def test_schedule_and_evaluation_in_epochs() -> None:
    recipe = resolve(
        samples=3200,
        data=VALIDATED,
        train={"epochs": 90},
        schedule={"kind": "step", "warmup_epochs": 0.5, "milestone_epochs": [30, 60, 80]},
        evaluation={"every_epochs": 2, "patience_epochs": 5},
    )
    assert recipe.train.steps == 9000
    assert (recipe.schedule.warmup_steps, recipe.schedule.milestones) == (50, (3000, 6000, 8000))
    assert (recipe.evaluation.every, recipe.evaluation.patience) == (200, 3)  # 5 epochs are 2.5 evaluations


def test_epochs_beside_a_number_of_steps() -> None:
    recipe = resolve(train={"steps": 1000}, schedule={"warmup_epochs": 2})
    assert (recipe.train.steps, recipe.schedule.warmup_steps) == (1000, 62)
    assert resolve(train={"epochs": 2}, schedule={"warmup_epochs": 0}).schedule.resolve_warmup_steps(63) == 0


def test_ratio_of_warmup_follows_the_steps() -> None:
    schedule = resolve(train={"epochs": 32}, schedule={"warmup_ratio": 0.1}).schedule
    assert schedule.resolve_warmup_steps(1000) == 100


def test_resolved_recipe_is_valid_and_stays_the_same_when_it_is_read_again() -> None:
    recipe = resolve(train={"epochs": 2}, schedule={"warmup_epochs": 1})
    document = msgspec.to_builtins(recipe)
    assert build(document, Recipe, "spec.toml") == recipe
    assert resolve(recipe.data.samples, **document) == recipe


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"train": {"epochs": 1}, "schedule": {"warmup_epochs": 2}}, "warmup_steps = 62 is not less than train.steps"),
        (
            {"train": {"epochs": 1}, "schedule": {"kind": "step", "milestone_epochs": [0.01, 0.02]}},
            r"milestones = \[0, 1\]: must be steps of 1 or more",
        ),
        (
            {"train": {"epochs": 1}, "schedule": {"kind": "step", "milestone_epochs": [2]}},
            "must lie before train.steps = 32",
        ),
    ],
)
def test_contradiction_names_the_length_of_an_epoch(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(**tables)
    assert "1000 samples / 32 per step = 31.25 steps" in caught.value.message
    assert "train.epochs" in caught.value.fix


@pytest.mark.parametrize(
    "text",
    ["train.epochs=-1", "schedule.warmup_epochs=-1", "schedule.warmup_ratio=1", "evaluation.every_epochs=-2"],
)
def test_values_out_of_range_are_refused(text: str) -> None:
    key, _, value = text.partition("=")
    table, name = key.split(".")
    with pytest.raises(ConfigError, match=rf"{name} = .*must be"):
        build({table: {name: float(value)}}, Recipe, "recipe")


def test_milestones_in_epochs_must_ascend() -> None:
    with pytest.raises(ConfigError, match=r"milestone_epochs = \[2.0, 1.0\]"):
        build({"schedule": {"kind": "step", "milestone_epochs": [2, 1]}}, Recipe, "recipe")


@pytest.mark.parametrize("group", epochs.ALTERNATIVES, ids=lambda group: group[0])
def test_same_quantity_twice_is_refused(group: tuple[str, ...]) -> None:
    document: dict[str, Any] = {}
    for key in group[:2]:
        table, name = key.split(".")
        document.setdefault(table, {})[name] = 1
    with pytest.raises(ConfigError, match=f"{group[0]} and {group[1]} are mutually exclusive"):
        epochs.check_alternatives(document, "a.toml")


def test_value_that_means_none_excludes_nothing() -> None:
    epochs.check_alternatives({"train": {"epochs": 0, "steps": 9}, "evaluation": {"every": 0, "every_epochs": 1}}, "")
    epochs.check_alternatives({"schedule": {"warmup_steps": -1, "warmup_epochs": 1, "milestones": []}}, "")
    with pytest.raises(ConfigError, match="mutually exclusive"):
        epochs.check_alternatives({"schedule": {"warmup_steps": 0, "warmup_epochs": 1}}, "")


def test_description_has_the_arithmetic() -> None:
    recipe = resolve(data=VALIDATED, train={"epochs": 3}, evaluation={"patience_epochs": 1.5})
    assert epochs.describe_epochs(recipe, 32) == (
        "1000 samples / 32 per step = 31.25 steps; train.epochs = 3: 94, evaluation.patience_epochs = 1.5: 6 "
        "evaluations"
    )
