"""The evaluations that a recipe configures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from clustertrain.config.evaluation import VALIDATION_PREFIX
from clustertrain.config.recipe import Recipe
from clustertrain.train.evaluation.best_metric import LOSS_METRIC
from clustertrain.train.evaluation.schedule import EvaluationSchedule
from clustertrain.train.models import build

if TYPE_CHECKING:
    from clustertrain.train.models.build import TrainingTask
    from clustertrain.train.session.session import Session


def build_evaluations(
    session: Session, task: TrainingTask, recipe: Recipe, *, on_value: Callable[[float], None] | None = None
) -> EvaluationSchedule | None:
    """Return the recipe's evaluation schedule, or None without validation data.

    Args:
        on_value: called with the metric's value after each evaluation.

    Raises:
        ConfigError: the validation data is empty.
    """
    if task.validation is None:
        return None
    spec, metric = recipe.evaluation, recipe.deciding_metric
    is_validation_metric = metric.startswith(VALIDATION_PREFIX)
    # The inputs of a loss that the model computes itself are unknown, so no metric is added to the recipe's.
    has_model_loss = build.find_model_loss(recipe, task.model) is not None
    return session.evaluations(
        task.validation,
        task.loss,
        every=recipe.evaluation_interval,
        metric=metric if is_validation_metric else LOSS_METRIC,
        higher_is_better=is_validation_metric and recipe.higher_is_better,
        patience=spec.patience,
        warn_when_rising=spec.warn_when_rising,
        slices=recipe.contract.slices,
        on_value=on_value,
        metrics=spec.metrics if has_model_loss else recipe.evaluated_metrics,
        micro_batch=spec.micro_batch or None,
        samples=spec.samples,
        workers=recipe.data.workers,
        group=recipe.model.two_tower.group if recipe.model.kind == "two-tower" else 1,
        ignore_index=recipe.objective.ignore_index,
        limits=task.limits,
    )
