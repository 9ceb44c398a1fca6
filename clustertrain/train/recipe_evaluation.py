"""The evaluations that a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from clustertrain.config.evaluation import PREFIX
from clustertrain.config.recipe import Recipe
from clustertrain.train.evaluation.best_metric import LOSS
from clustertrain.train.evaluation.schedule import Evaluations
from clustertrain.train.models import build

if TYPE_CHECKING:
    from clustertrain.train.models.build import Task
    from clustertrain.train.session.session import Session


def of_recipe(
    session: Session, task: Task, recipe: Recipe, *, then: Callable[[float], None] | None = None
) -> Evaluations | None:
    """None where nothing is kept apart to evaluate on. Raises ConfigError where what is kept apart is empty."""
    if task.validation is None:
        return None
    asked, metric = recipe.evaluation, recipe.deciding_metric
    on_validation = metric.startswith(PREFIX)
    # What a loss of the model's own is computed from is not known, so nothing is taken for granted.
    own_loss = build.own_loss(recipe, task.model) is not None
    return session.evaluations(
        task.validation,
        task.loss,
        every=recipe.evaluate_every,
        metric=metric if on_validation else LOSS,
        higher_is_better=on_validation and recipe.higher_is_better,
        patience=asked.patience,
        rising=asked.rising,
        slices=recipe.contract.slices,
        then=then,
        metrics=asked.metrics if own_loss else recipe.evaluated_metrics,
        micro_batch=asked.micro_batch or None,
        samples=asked.samples,
        workers=recipe.data.workers,
        group=recipe.model.two_tower.group if recipe.model.kind == "two-tower" else 1,
        ignore_index=recipe.objective.ignore_index,
        limits=task.limits,
    )
