"""The loss that a model should have before it has learned anything: another one tells of a mistake in the model, its
initial values or the labels before any time is spent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from clustertrain.config.recipe import Recipe


@dataclass(frozen=True)
class ExpectedLoss:
    """``loss`` of outputs that carry no information, and the formula that it comes of."""

    loss: float
    formula: str


def initial_loss(recipe: Recipe, classes: int | None, targets: torch.Tensor | None = None) -> ExpectedLoss | None:
    """What ``recipe``'s objective gives at random initialisation.

    Args:
        classes: how many the model's logits tell apart; None: not known.
        targets: of some samples, for what depends on them: mse, l1 and huber, where the outputs are near 0 at first.

    Returns:
        None where it cannot be told.
    """
    kind = recipe.objective_kind
    if kind == "cross-entropy":
        # Label smoothing changes nothing: of equal probabilities every class costs the same.
        return None if classes is None else ExpectedLoss(math.log(classes), f"ln {classes}")
    if kind == "binary-cross-entropy":
        return ExpectedLoss(math.log(2), "ln 2")
    if kind == "nt-xent":
        if recipe.model.kind == "two-tower":
            group = recipe.model.two_tower.group
            return ExpectedLoss(math.log(group), f"ln {group}, the passages of a group")
        return None  # of the size of the micro-batch, which the plan chooses
    if targets is None or not targets.numel():
        return None
    magnitude = targets.double().abs()
    if kind == "mse":
        return ExpectedLoss(magnitude.square().mean().item(), "the mean of the squared targets")
    if kind == "l1":
        return ExpectedLoss(magnitude.mean().item(), "the mean of the targets' size")
    delta = recipe.objective.delta
    huber = torch.where(magnitude <= delta, magnitude.square() / 2, delta * (magnitude - delta / 2))
    return ExpectedLoss(huber.mean().item(), "the mean Huber loss of the targets against 0")
