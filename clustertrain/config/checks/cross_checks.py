"""Checks of a recipe's tables against each other: each may be valid alone, but not in combination."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from clustertrain.config.checks import adapter_checks, slice_checks
from clustertrain.config.data import BUILT_IN_DATASETS, DIGIT_HALF_PIXELS, DIGITS
from clustertrain.config.evaluation import SLICE_SEPARATOR, VALIDATION_PREFIX, MetricName
from clustertrain.config.model import DATA_KINDS_BY_MODEL
from clustertrain.config.objective import ObjectiveKind
from clustertrain.config.parsing.documents import did_you_mean, format_value
from clustertrain.config.train import UNRESOLVED
from clustertrain.errors import ConfigError

if TYPE_CHECKING:
    from clustertrain.config.recipe import Recipe

_TRAINING_SCALARS = ("loss", "grad_norm")  # deciding metrics available without an evaluation
_CLASSIFICATION_METRICS: tuple[MetricName, ...] = ("accuracy", "top5")
_REGRESSION_METRICS: tuple[MetricName, ...] = ("mae", "rmse")
_LANGUAGE_MODEL_METRICS: tuple[MetricName, ...] = ("perplexity", "bits_per_token")
# Metrics computable from an objective's outputs and targets.
METRICS_BY_OBJECTIVE: Mapping[ObjectiveKind, tuple[MetricName, ...]] = {
    "cross-entropy": (*_CLASSIFICATION_METRICS, *_LANGUAGE_MODEL_METRICS),
    "binary-cross-entropy": ("accuracy",),
    "mse": _REGRESSION_METRICS,
    "l1": _REGRESSION_METRICS,
    "huber": _REGRESSION_METRICS,
    "nt-xent": ("recall_at_1",),
    "dpo": ("reward_accuracy",),
}


def default_metrics(objective: ObjectiveKind, *, is_text: bool) -> tuple[MetricName, ...]:
    """Return the metrics of an evaluation if the recipe names none."""
    if objective == "cross-entropy":
        return ("accuracy", *_LANGUAGE_MODEL_METRICS) if is_text else ("accuracy",)
    return METRICS_BY_OBJECTIVE[objective][:1]


def check_recipe(recipe: Recipe) -> None:
    """Raise ValueError, with the keys of both tables, if two tables contradict each other."""
    _check_data(recipe)
    _check_objective(recipe)
    if recipe.train.steps != UNRESOLVED:
        _check_schedule(recipe)
        _check_roll_back(recipe)
    _check_evaluation(recipe)
    _check_best(recipe)
    adapter_checks.check_adapter(recipe)


def _check_data(recipe: Recipe) -> None:
    model, data = recipe.model, recipe.data
    data_kinds = DATA_KINDS_BY_MODEL[model.kind]
    if not model.entry and data.kind not in ("auto", *data_kinds):
        raise ValueError(f"data.kind = {data.kind!r}: a {model.kind} trains on {' or '.join(data_kinds)}")
    train_path = data.path or BUILT_IN_DATASETS.get(recipe.data_kind, ("",))[0]
    if data.validation_path and data.validation_path == train_path:
        raise ValueError(
            f"data.validation_path = {data.validation_path!r} is the training data: "
            "give another path or set data.validation"
        )
    if data.kind == "tokens" and not data.path:
        raise ValueError("data.kind = 'tokens' needs data.path, the folder of shards")
    if recipe.is_text and 0 < model.max_seq_len < data.seq_len:
        raise ValueError(f"data.seq_len = {data.seq_len} exceeds model.max_seq_len = {model.max_seq_len}")
    if recipe.data_kind == "pairs" and data.path == DIGITS and data.seq_len != DIGIT_HALF_PIXELS:
        raise ValueError(f"data.seq_len = {data.seq_len}: must be {DIGIT_HALF_PIXELS}, the pixels of half a digit")
    if recipe.attends_in_documents and not model.entry and not model.is_decoder:
        raise ValueError(
            f"data.attention = 'document': a {model.kind} has no attention inside documents, only the decoder and a "
            "model.entry may: remove data.attention"
        )
    if data.augment.mixup and recipe.objective_kind != "cross-entropy":
        raise ValueError(
            f"data.augment.mixup mixes classes, which objective.kind = {recipe.objective_kind!r} does not have"
        )


def _check_objective(recipe: Recipe) -> None:
    if recipe.objective_kind == "nt-xent" and recipe.train.global_batch == 1:
        raise ValueError("train.global_batch = 1: objective.kind = 'nt-xent' compares at least two samples")
    if recipe.objective_kind == "dpo":
        _check_preferences(recipe)
        return
    # A model entry may return anything; the built-in models return logits of classes, or similarities.
    if recipe.model.entry:
        return
    expected = "nt-xent" if recipe.model.kind == "two-tower" else "cross-entropy"
    if recipe.data_kind != "custom" and recipe.objective_kind != expected:
        raise ValueError(
            f"objective.kind = {recipe.objective_kind!r}: a {recipe.model.kind} on {recipe.data_kind} is trained with "
            + expected
        )


def _check_preferences(recipe: Recipe) -> None:
    """Raise ValueError for tables that preference optimization cannot use."""
    model, data = recipe.model, recipe.data
    name = "objective.kind = 'dpo'"
    if not model.is_decoder:
        other = f"model.entry = {model.entry!r}" if model.entry else f"model.kind = {model.kind!r}"
        raise ValueError(f"{name} compares answers of the built-in decoder: remove {other}")
    if data.kind != "chat":
        raise ValueError(f"{name} needs data.kind = 'chat', with a chosen and a rejected answer in each row")
    if data.pack:
        raise ValueError(f"{name} and data.pack: each answer is a sequence of its own: remove data.pack")


def _check_schedule(recipe: Recipe) -> None:
    schedule, steps = recipe.schedule, recipe.train.steps
    if schedule.warmup_steps >= steps > 1:
        raise ValueError(
            f"schedule.warmup_steps = {schedule.warmup_steps} is not less than train.steps = {steps}: the rate would "
            "never reach its peak"
        )
    warmup, cooldown = schedule.resolve_warmup_steps(steps), schedule.resolve_cooldown_steps(steps)
    if schedule.kind == "wsd" and warmup + cooldown > steps:
        raise ValueError(
            f"schedule.warmup_steps = {warmup} and cooldown_steps = {cooldown} together exceed train.steps = {steps}"
        )
    if schedule.kind == "step" and schedule.milestones and schedule.milestones[-1] >= steps:
        raise ValueError(f"schedule.milestones = {list(schedule.milestones)}: must lie before train.steps = {steps}")
    if schedule.kind == "plateau" and not recipe.data.has_validation:
        raise ValueError(
            "schedule.kind = 'plateau' follows a validation metric: set data.validation (a fraction of the samples) or "
            "data.validation_path"
        )
    if schedule.kind == "plateau" and recipe.evaluation_interval >= steps:
        raise ValueError(
            f"schedule.kind = 'plateau' and evaluation.every = {recipe.evaluation_interval}: only the last of "
            f"train.steps = {steps} is evaluated, so the rate would never fall"
        )
    late_steps = [u.step for u in recipe.optim.unfreeze if u.step >= steps]
    if late_steps:
        raise ValueError(f"optim.unfreeze: step {late_steps[0]} is not before train.steps = {steps}")


def _check_evaluation(recipe: Recipe) -> None:
    evaluation, available = recipe.evaluation, METRICS_BY_OBJECTIVE[recipe.objective_kind]
    if evaluation.save_predictions and recipe.objective_kind == "nt-xent":
        raise ValueError(
            "evaluation.save_predictions: NT-Xent compares samples with each other, and there is no prediction per "
            "sample: set it to 0"
        )
    if evaluation.save_predictions and recipe.objective_kind == "dpo":
        raise ValueError(
            "evaluation.save_predictions: DPO compares the log-probabilities of two answers, and there is no "
            "prediction per sample: set it to 0"
        )
    for name in evaluation.metrics:
        if name not in available and not recipe.model.entry:
            raise ValueError(
                f"evaluation.metrics: {name!r} is not available for objective.kind = {recipe.objective_kind!r}: "
                f"use {', '.join(available)}"
            )


def check_contract(recipe: Recipe, source: str) -> None:
    """Check that the evaluations produce the metrics and slices of the contract.

    Not for scripts, which evaluate the model themselves.

    Raises:
        ConfigError: they do not; the message has the keys and ``source``.
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
            f"contract.metric = {contract.metric!r} is a training metric, but with validation data evaluations decide "
            f"(evaluation.patience, the best checkpoint, status): use {VALIDATION_PREFIX}loss or another validation "
            "metric, or remove the validation data"
        )
    if contract.slices and not validates:
        raise ValueError("contract.slices need validation data: set data.validation or data.validation_path")
    for key, scalar in (("contract.metric", contract.metric), ("checkpoint.best", recipe.checkpoint.best)):
        if scalar not in ("", *_TRAINING_SCALARS):
            _check_evaluated(recipe, f"{key} = {scalar!r}", scalar.partition(SLICE_SEPARATOR)[0])


def _check_evaluated(recipe: Recipe, key: str, metric: str) -> None:
    """Raise ValueError unless the evaluation produces ``metric``, which ``key`` names."""
    available = [f"{VALIDATION_PREFIX}loss", *(f"{VALIDATION_PREFIX}{m}" for m in recipe.evaluated_metrics)]
    validates = recipe.data.has_validation
    if f"{VALIDATION_PREFIX}{metric}" in available:
        raise ValueError(f"{key}: did you mean {VALIDATION_PREFIX}{metric}?")
    if metric.startswith(VALIDATION_PREFIX) and not validates:
        raise ValueError(f"{key} needs validation data: set data.validation or data.validation_path")
    if metric in available:
        return
    if (
        metric.startswith(VALIDATION_PREFIX)
        and metric.removeprefix(VALIDATION_PREFIX) in METRICS_BY_OBJECTIVE[recipe.objective_kind]
    ):
        raise ValueError(f"{key}: add {metric.removeprefix(VALIDATION_PREFIX)!r} to evaluation.metrics")
    problem = "is not produced by the evaluation" if validates else "is not measured without validation data"
    raise ValueError(
        f"{key} {problem}: {did_you_mean(metric, [*_TRAINING_SCALARS, *(available if validates else ())])}"
    )


def check_custom_loss(recipe: Recipe) -> None:
    """Check that ``evaluation.metrics`` has the deciding metric of a model that computes its loss itself.

    For such a model, only the metrics listed there are measured.

    Raises:
        ConfigError: the deciding metric is missing.
    """
    for key, scalar in (("contract.metric", recipe.contract.metric), ("checkpoint.best", recipe.checkpoint.best)):
        name = find_unmeasured_metric(recipe, scalar)
        if name:
            raise ConfigError(
                f"{key} = {scalar!r}: {recipe.model.entry} computes its loss itself, so only the metrics in "
                "evaluation.metrics are measured",
                fix=(
                    f"set evaluation.metrics = {format_value([*recipe.evaluation.metrics, name])}, or use"
                    f" {VALIDATION_PREFIX}loss"
                ),
            )


def find_unmeasured_metric(recipe: Recipe, scalar: str) -> str:
    """Return the metric of ``scalar`` if it is unmeasured because the model computes its loss itself, otherwise ''."""
    name = scalar.partition(SLICE_SEPARATOR)[0].removeprefix(VALIDATION_PREFIX)
    has_custom_loss = recipe.model.entry and recipe.objective.kind == "auto" and recipe.data.has_validation
    return (
        name
        if has_custom_loss and scalar.startswith(VALIDATION_PREFIX) and name not in ("loss", *recipe.evaluation.metrics)
        else ""
    )


def _check_best(recipe: Recipe) -> None:
    """Raise ValueError if two tables name different deciding metrics or directions."""
    contract, checkpoint = recipe.contract, recipe.checkpoint
    if contract.metric and checkpoint.best and contract.metric != checkpoint.best:
        raise ValueError(
            f"contract.metric = {contract.metric!r} and checkpoint.best = {checkpoint.best!r}: two metrics would "
            "decide which checkpoint is best: remove checkpoint.best"
        )
    is_same_metric = checkpoint.best in ("", recipe.deciding_metric)
    modes = {contract.mode, checkpoint.best_mode} - {"auto"}
    if is_same_metric and len(modes) > 1:
        raise ValueError(
            f"contract.mode = {contract.mode!r} and checkpoint.best_mode = {checkpoint.best_mode!r} contradict each "
            f"other for {recipe.deciding_metric}: remove checkpoint.best_mode"
        )


def _check_roll_back(recipe: Recipe) -> None:
    """Raise ValueError if later saves would delete all checkpoints from before the first bad step."""
    stability, checkpoint = recipe.stability, recipe.checkpoint
    if not stability.can_roll_back or not isinstance(checkpoint.every, int):
        return
    if checkpoint.every >= recipe.train.steps:
        raise ValueError(
            f"stability rolls back, and checkpoint.every = {checkpoint.every} is not less than train.steps = "
            f"{recipe.train.steps}: there would be no checkpoint to return to"
        )
    reach = stability.roll_back_margin + (stability.max_skipped if stability.on_divergence == "roll-back" else 1)
    if checkpoint.keep * checkpoint.every <= reach:
        raise ValueError(
            f"stability rolls back by up to {reach} steps, but checkpoint.keep = {checkpoint.keep} with every = "
            f"{checkpoint.every} keeps no checkpoint that old: increase checkpoint.keep"
        )
