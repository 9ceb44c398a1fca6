"""Losses compared with their definitions in float64, their counts, and their value before training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.train.models import losses


def recipe(**tables: Any) -> Recipe:
    return build(tables, Recipe, "recipe.toml")


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean(summed: tuple[torch.Tensor, torch.Tensor | int]) -> float:
    total, count = summed
    return float(total) / float(count)


def test_float_targets_need_a_named_objective() -> None:
    """Cross-entropy with one class is always 0, so a regression would seem to fit perfectly."""
    outputs, values = random(4, 1), random(4, 1, seed=2)
    with pytest.raises(ConfigError, match=r"targets are float32.*objective\.kind is auto"):
        losses.build_loss(recipe())(outputs, values)
    with pytest.raises(ConfigError, match="a single class is always 0"):
        losses.build_loss(recipe(objective={"kind": "cross-entropy"}))(outputs, values)
    with pytest.raises(ConfigError, match="a single class is always 0"):
        losses.build_loss(recipe())(outputs, torch.zeros(4, dtype=torch.long))
    probabilities = random(4, 3).softmax(-1)
    total, _ = losses.build_loss(recipe(objective={"kind": "cross-entropy"}))(random(4, 3, seed=5), probabilities)  # type: ignore[misc]
    assert float(total) > 0


def test_cross_entropy_smooths_and_skips_ignored_targets() -> None:
    logits, targets = random(3, 5, 7), torch.arange(15).reshape(3, 5) % 7
    targets[0, 0] = targets[2, 4] = -1
    loss = losses.build_loss(recipe(objective={"label_smoothing": 0.1, "ignore_index": -1}))
    counted = targets != -1
    p = logits.double().log_softmax(-1)[counted]
    expected_loss = -(0.9 * p.gather(1, targets[counted][:, None]).squeeze(1) + 0.1 * p.mean(1))
    total, count = loss(logits, targets)  # type: ignore[misc]
    assert int(count) == 13
    assert float(total) == pytest.approx(float(expected_loss.sum()), rel=1e-6)


def test_cross_entropy_of_probabilities_is_a_weighted_sum() -> None:
    logits, weight = random(4, 6), 0.3
    a, b = torch.tensor([0, 1, 2, 3]), torch.tensor([5, 4, 3, 2])
    one_hot = torch.nn.functional.one_hot
    mixed = weight * one_hot(a, 6) + (1 - weight) * one_hot(b, 6)
    expected_loss = weight * mean(losses.cross_entropy(logits, a)) + (1 - weight) * mean(
        losses.cross_entropy(logits, b)
    )
    assert mean(losses.cross_entropy(logits, mixed.float())) == pytest.approx(expected_loss, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected_loss"),
    [
        ("mse", lambda d: d.square()),
        ("l1", lambda d: d.abs()),
        ("huber", lambda d: torch.where(d.abs() <= 0.5, d.square() / 2, 0.5 * (d.abs() - 0.25))),
    ],
    ids=["mse", "l1", "huber"],
)
def test_regression_losses_match_their_definitions(kind: str, expected_loss: Any) -> None:
    outputs, targets = random(6, 3), random(6, 3, seed=2)
    spec = recipe(objective={"kind": kind, "delta": 0.5}, model={"entry": "nets:Net"})
    result = losses.build_loss(spec)(outputs, targets)
    assert mean(result) == pytest.approx(float(expected_loss((outputs - targets).double()).mean()), rel=1e-6)  # type: ignore[arg-type]


def test_binary_cross_entropy_is_finite_for_extreme_logits() -> None:
    loss = losses.build_loss(recipe(objective={"kind": "binary-cross-entropy"}, model={"entry": "nets:Net"}))
    assert mean(loss(torch.tensor([1e4, -1e4]), torch.tensor([0, 1]))) == pytest.approx(1e4)  # type: ignore[arg-type]
    assert mean(loss(torch.zeros(5, 2), torch.ones(5, 2))) == pytest.approx(math.log(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mse", "l1", "huber", "binary-cross-entropy"])
def test_shapes_that_torch_would_broadcast_raise(kind: str) -> None:
    loss = losses.build_loss(recipe(objective={"kind": kind}, model={"entry": "nets:Net"}))
    with pytest.raises(ConfigError, match=r"\(6, 1\) with targets of shape \(6,\)"):
        loss(random(6, 1), random(6))


def test_targets_of_other_shape_than_logits_raise() -> None:
    with pytest.raises(ConfigError, match=r"\(4,\) with targets of shape \(5,\)"):
        losses.cross_entropy(random(4, 3), torch.zeros(5, dtype=torch.long))
