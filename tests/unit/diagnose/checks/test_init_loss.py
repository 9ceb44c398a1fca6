"""The expected loss before training equals the loss of outputs that carry no information."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.diagnose.checks.init_loss import initial_loss
from clustertrain.train.models import losses


def make_recipe(**tables: Any) -> Recipe:
    return build(tables, Recipe, "recipe.toml")


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean(summed: tuple[torch.Tensor, torch.Tensor | int]) -> float:
    total, count = summed
    return float(total) / float(count)


@pytest.mark.parametrize(
    ("tables", "classes", "logits"),
    [
        ({}, 256, torch.zeros(2, 5, 256)),
        ({"objective": {"label_smoothing": 0.1}}, 10, torch.zeros(4, 10)),
    ],
    ids=["cross-entropy", "label smoothing"],
)
def test_initial_loss_matches_uninformative_outputs(
    tables: dict[str, Any], classes: int | None, logits: torch.Tensor
) -> None:
    recipe = make_recipe(**tables)
    expected = initial_loss(recipe, classes)
    targets = torch.arange(logits[..., 0].numel()).reshape(logits.shape[:-1]) % (classes or 10**6)
    assert expected is not None
    assert mean(losses.build_loss(recipe)(logits, targets)) == pytest.approx(expected.loss, rel=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [0, 8])
def test_initial_loss_of_two_towers_matches_equal_embeddings(group: int) -> None:
    recipe = make_recipe(model={"kind": "two-tower"}, objective={"group": group})
    expected = initial_loss(recipe, None, samples=16)
    output = (torch.ones(16, 4), torch.ones(16, 4), torch.ones(1))
    assert expected is not None
    assert mean(losses.build_loss(recipe)(output, torch.arange(16))) == pytest.approx(expected.loss, rel=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mse", "l1", "huber"])
def test_initial_loss_of_regression_matches_zero_outputs(kind: str) -> None:
    recipe = make_recipe(objective={"kind": kind, "delta": 0.7}, model={"entry": "nets:Net"})
    targets = random(50, 2) + 1
    expected = initial_loss(recipe, None, targets)
    assert expected is not None
    actual = losses.build_loss(recipe)(torch.zeros_like(targets), targets)
    assert mean(actual) == pytest.approx(expected.loss, rel=1e-5)  # type: ignore[arg-type]


def test_initial_loss_is_none_when_unknown() -> None:
    assert initial_loss(make_recipe(), None) is None
    assert initial_loss(make_recipe(objective={"kind": "mse"}, model={"entry": "nets:Net"}), None) is None
