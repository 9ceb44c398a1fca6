"""What the tables of a recipe say of each other: each alone may be right, and together they cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from clustertrain.config.checks import slice_checks
from clustertrain.config.data import BUILT_IN_DATASETS, DIGIT_HALF_PIXELS, DIGITS
from clustertrain.config.evaluation import SLICE_SEPARATOR, VALIDATION_PREFIX, MetricName
from clustertrain.config.objective import ObjectiveKind
from clustertrain.config.parsing.documents import did_you_mean, format_value
from clustertrain.errors import ConfigError

if TYPE_CHECKING:
    from clustertrain.config.recipe import Recipe

_TRAINING_SCALARS = ("loss", "grad_norm")  # what decides without an evaluation
_CLASSIFICATION_METRICS: tuple[MetricName, ...] = ("accuracy", "top5")
_REGRESSION_METRICS: tuple[MetricName, ...] = ("mae", "rmse")
_LANGUAGE_MODEL_METRICS: tuple[MetricName, ...] = ("perplexity", "bits_per_token")
# What can be computed from an objective's outputs and targets.
METRICS_BY_OBJECTIVE: Mapping[ObjectiveKind, tuple[MetricName, ...]] = {
    "cross-entropy": (*_CLASSIFICATION_METRICS, *_LANGUAGE_MODEL_METRICS),
    "binary-cross-entropy": ("accuracy",),
    "mse": _REGRESSION_METRICS,
    "l1": _REGRESSION_METRICS,
    "huber": _REGRESSION_METRICS,
    "nt-xent": ("recall_at_1",),
}


def default_metrics(objective: ObjectiveKind, *, is_text: bool) -> tuple[MetricName, ...]:
    """What an evaluation gives where the recipe names nothing."""
    if objective == "cross-entropy":
        return ("accuracy", *_LANGUAGE_MODEL_METRICS) if is_text else ("accuracy",)
    return METRICS_BY_OBJECTIVE[objective][:1]


def check_recipe(recipe: Recipe) -> None:
    """Raises ValueError, naming the keys of both tables."""
    _check_data(recipe)
    _check_objective(recipe)
    _check_schedule(recipe)
    _check_evaluation(recipe)
    _check_roll_back(recipe)
    _check_best(recipe)


def _check_data(recipe: Recipe) -> None:
    from clustertrain.config.recipe import DATA_KINDS_BY_MODEL

    model, data = recipe.model, recipe.data
    data_kinds = DATA_KINDS_BY_MODEL[model.kind]
    if not model.entry and data.kind not in ("auto", *data_kinds):
        raise ValueError(f"data.kind = {data.kind!r}: a {model.kind} learns from {' or '.join(data_kinds)}")
    train_path = data.path or BUILT_IN_DATASETS.get(recipe.data_kind, ("",))[0]
    if data.validation_path and data.validation_path == train_path:
        raise ValueError(
            f"data.validation_path = {data.validation_path!r} is what is learned from: give others, or data.validation"
        )
    if data.kind == "tokens" and not data.path:
        raise ValueError("data.kind = 'tokens' and no data.path: name the folder of shards")
    if recipe.is_text and 0 < model.max_seq_len < data.seq_len:
        raise ValueError(
            f"data.seq_len = {data.seq_len} is more than the model takes: model.max_seq_len = {model.max_seq_len}"
        )
    if recipe.data_kind == "pairs" and data.path == DIGITS and data.seq_len != DIGIT_HALF_PIXELS:
        raise ValueError(
            f"data.seq_len = {data.seq_len}: half a digit has {DIGIT_HALF_PIXELS} pixels, so set {DIGIT_HALF_PIXELS}"
        )
    if data.augment.mixup and recipe.objective_kind != "cross-entropy":
        raise ValueError(f"data.augment.mixup mixes classes: objective.kind = {recipe.objective_kind!r} has none")


def _check_objective(recipe: Recipe) -> None:
    """A module of one's own may give what it likes; the built-in ones give logits of classes, or similarities."""
    if recipe.model.entry:
        return
    expected = "nt-xent" if recipe.model.kind == "two-tower" else "cross-entropy"
    if recipe.data_kind != "own" and recipe.objective_kind != expected:
        raise ValueError(
            f"objective.kind = {recipe.objective_kind!r}: a {recipe.model.kind} on {recipe.data_kind} is trained by "
            + expected
        )


def _check_schedule(recipe: Recipe) -> None:
    schedule, steps = recipe.schedule, recipe.train.steps
    if schedule.warmup_steps >= steps > 1:
        raise ValueError(
            f"schedule.warmup_steps = {schedule.warmup_steps} is not less than train.steps = {steps}: the rate would "
            "never get to its peak"
        )
    warmup, cooldown = schedule.resolve_warmup_steps(steps), schedule.resolve_cooldown_steps(steps)
    if schedule.kind == "wsd" and warmup + cooldown > steps:
        raise ValueError(
            f"schedule.warmup_steps = {warmup} and cooldown_steps = {cooldown} are more than train.steps = {steps} "
            "together"
        )
    if schedule.kind == "step" and schedule.milestones and schedule.milestones[-1] >= steps:
        raise ValueError(f"schedule.milestones = {list(schedule.milestones)}: must lie before train.steps = {steps}")
    if schedule.kind == "plateau" and not recipe.data.has_validation:
        raise ValueError(
            "schedule.kind = 'plateau' follows a validation metric: set data.validation (a share of the samples) or "
            "data.validation_path"
        )
    if schedule.kind == "plateau" and recipe.evaluation_interval >= steps:
        raise ValueError(
            f"schedule.kind = 'plateau' and evaluation.every = {recipe.evaluation_interval}: of train.steps = {steps}"
            " only the last one is evaluated, and the rate would never fall"
        )
    late_steps = [u.step for u in recipe.optim.unfreeze if u.step >= steps]
    if late_steps:
        raise ValueError(f"optim.unfreeze: step {late_steps[0]} is not before train.steps = {steps}")


def _check_evaluation(recipe: Recipe) -> None:
    evaluation, available = recipe.evaluation, METRICS_BY_OBJECTIVE[recipe.objective_kind]
    for name in evaluation.metrics:
        if name not in available and not recipe.model.entry:
            raise ValueError(
                f"evaluation.metrics: {name!r} cannot be told of objective.kind = {recipe.objective_kind!r}: "
                f"{', '.join(available)}"
            )


def check_contract(recipe: Recipe, source: str) -> None:
    """What the contract asks of the evaluations. A script makes its own, of which nothing is known here.

    Raises:
        ConfigError: they do not give it; names the keys and ``source``.
    """
    try:
        _check_contract(recipe)
        slice_checks.check_consistency(recipe)
    except ValueError as e:
        raise ConfigError(f"{source}: {e}") from e


def _check_contract(recipe: Recipe) -> None:
    contract, validates = recipe.contract, recipe.data.has_validation
    if contract.metric in _TRAINING_SCALARS and validates:
        raise ValueError(
            f"contract.metric = {contract.metric!r} is one of training, and with data to validate on evaluations decide"
            f" (evaluation.patience, the best checkpoint, status): name {VALIDATION_PREFIX}loss or another one of the"
            " validation data, or leave that data out"
        )
    if contract.slices and not validates:
        raise ValueError("contract.slices are of the validation data: set data.validation or data.validation_path")
    for key, scalar in (("contract.metric", contract.metric), ("checkpoint.best", recipe.checkpoint.best)):
        if scalar not in ("", *_TRAINING_SCALARS):
            _check_evaluated(recipe, f"{key} = {scalar!r}", scalar.partition(SLICE_SEPARATOR)[0])


def _check_evaluated(recipe: Recipe, key: str, metric: str) -> None:
    """Raises ValueError where no evaluation gives what ``key`` has ``metric``."""
    available = [f"{VALIDATION_PREFIX}loss", *(f"{VALIDATION_PREFIX}{m}" for m in recipe.evaluated_metrics)]
    validates = recipe.data.has_validation
    if f"{VALIDATION_PREFIX}{metric}" in available:
        raise ValueError(f"{key}: did you mean {VALIDATION_PREFIX}{metric}?")
    if metric.startswith(VALIDATION_PREFIX) and not validates:
        raise ValueError(f"{key} is one of the validation data: set data.validation or data.validation_path")
    if metric in available:
        return
    if (
        metric.startswith(VALIDATION_PREFIX)
        and metric.removeprefix(VALIDATION_PREFIX) in METRICS_BY_OBJECTIVE[recipe.objective_kind]
    ):
        raise ValueError(f"{key}: name {metric.removeprefix(VALIDATION_PREFIX)!r} in evaluation.metrics too")
    problem = "is none that the evaluation gives" if validates else "is none that is measured without validation data"
    raise ValueError(
        f"{key} {problem}: {did_you_mean(metric, [*_TRAINING_SCALARS, *(available if validates else ())])}"
    )


def check_custom_loss(recipe: Recipe) -> None:
    """Of a model with a loss of its own, of which nothing is known that could be measured: that what decides is one of
    ``evaluation.metrics``.

    Raises:
        ConfigError: it is not, so that no evaluation would give it.
    """
    for key, scalar in (("contract.metric", recipe.contract.metric), ("checkpoint.best", recipe.checkpoint.best)):
        name = find_unmeasured_metric(recipe, scalar)
        if name:
            raise ConfigError(
                f"{key} = {scalar!r}: {recipe.model.entry} has a loss of its own, and then only the metrics that are "
                "named are measured",
                fix=(
                    f"set evaluation.metrics = {format_value([*recipe.evaluation.metrics, name])}, or name"
                    f" {VALIDATION_PREFIX}loss"
                ),
            )


def find_unmeasured_metric(recipe: Recipe, scalar: str) -> str:
    """The metric behind ``scalar`` where a model's own loss would leave it unmeasured; else empty."""
    name = scalar.partition(SLICE_SEPARATOR)[0].removeprefix(VALIDATION_PREFIX)
    has_custom_loss = recipe.model.entry and recipe.objective.kind == "auto" and recipe.data.has_validation
    return (
        name
        if has_custom_loss and scalar.startswith(VALIDATION_PREFIX) and name not in ("loss", *recipe.evaluation.metrics)
        else ""
    )


def _check_best(recipe: Recipe) -> None:
    """One scalar decides, whichever table names it."""
    contract, checkpoint = recipe.contract, recipe.checkpoint
    if contract.metric and checkpoint.best and contract.metric != checkpoint.best:
        raise ValueError(
            f"contract.metric = {contract.metric!r} and checkpoint.best = {checkpoint.best!r}: two scalars would "
            "decide which checkpoint is the best; leave out checkpoint.best"
        )
    is_same_metric = checkpoint.best in ("", recipe.deciding_metric)
    modes = {contract.mode, checkpoint.best_mode} - {"auto"}
    if is_same_metric and len(modes) > 1:
        raise ValueError(
            f"contract.mode = {contract.mode!r} and checkpoint.best_mode = {checkpoint.best_mode!r} say the opposite "
            f"of {recipe.deciding_metric}: leave out checkpoint.best_mode"
        )


def _check_roll_back(recipe: Recipe) -> None:
    """Saves go on while steps are skipped: one from before the first of them must still be there."""
    stability, checkpoint = recipe.stability, recipe.checkpoint
    if not stability.can_roll_back or not isinstance(checkpoint.every, int):
        return
    if checkpoint.every >= recipe.train.steps:
        raise ValueError(
            f"stability rolls back, and checkpoint.every = {checkpoint.every} is not less than train.steps = "
            f"{recipe.train.steps}: there would be nothing to go back to"
        )
    reach = stability.roll_back_margin + (stability.max_skipped if stability.then == "roll-back" else 1)
    if checkpoint.keep * checkpoint.every <= reach:
        raise ValueError(
            f"stability goes back by up to {reach} steps, and checkpoint.keep = {checkpoint.keep} with every = "
            f"{checkpoint.every} keeps none as old as that: keep more of them"
        )
