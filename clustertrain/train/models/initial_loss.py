"""Expected loss before training; a different value reveals a mistake in the model, its initialization or the labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from clustertrain.config.recipe import Recipe


@dataclass(frozen=True)
class ExpectedLoss:
    """Loss of outputs that carry no information."""

    loss: float
    formula: str
    """The formula, for display."""


def initial_loss(recipe: Recipe, classes: int | None, targets: torch.Tensor | None = None) -> ExpectedLoss | None:
    """Return the expected loss of ``recipe``'s objective at random initialization; None if it is unknown.

    Args:
        classes: number of classes of the model's logits; None if unknown.
        targets: sample targets for mse, l1 and huber, whose loss depends on them (outputs start near 0).
    """
    kind = recipe.objective_kind
    if kind == "cross-entropy":
        # Label smoothing changes nothing: with equal probabilities every class has the same loss.
        return None if classes is None else ExpectedLoss(math.log(classes), f"ln {classes}")
    if kind == "binary-cross-entropy":
        return ExpectedLoss(math.log(2), "ln 2")
    if kind == "nt-xent":
        if recipe.model.kind == "two-tower":
            group = recipe.model.two_tower.group
            return ExpectedLoss(math.log(group), f"ln {group}, the passages of a group")
        return None  # depends on the micro-batch size, which the plan chooses
    if targets is None or not targets.numel():
        return None
    magnitude = targets.double().abs()
    if kind == "mse":
        return ExpectedLoss(magnitude.square().mean().item(), "the mean of the squared targets")
    if kind == "l1":
        return ExpectedLoss(magnitude.mean().item(), "the mean absolute value of the targets")
    delta = recipe.objective.delta
    huber = torch.where(magnitude <= delta, magnitude.square() / 2, delta * (magnitude - delta / 2))
    return ExpectedLoss(huber.mean().item(), "the mean Huber loss of the targets against 0")
