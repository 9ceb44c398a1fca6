"""What the tables of a recipe say of each other: each alone may be right, and together they cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from clustertrain.config import slice_checks
from clustertrain.config.data import BUILT_IN, DIGIT_HALF, DIGITS
from clustertrain.config.evaluation import PREFIX, SLICE, MetricName
from clustertrain.config.objective import ObjectiveKind
from clustertrain.config.parsing import nearest, text_of
from clustertrain.errors import ConfigError

if TYPE_CHECKING:
    from clustertrain.config.recipe import Recipe

_OF_TRAINING = ("loss", "grad_norm")  # what decides without an evaluation
_OF_CLASSES: tuple[MetricName, ...] = ("accuracy", "top5")
_OF_NUMBERS: tuple[MetricName, ...] = ("mae", "rmse")
_OF_TEXT: tuple[MetricName, ...] = ("perplexity", "bits_per_token")
# What can be computed from an objective's outputs and targets.
METRICS: Mapping[ObjectiveKind, tuple[MetricName, ...]] = {
    "cross-entropy": (*_OF_CLASSES, *_OF_TEXT),
    "binary-cross-entropy": ("accuracy",),
    "mse": _OF_NUMBERS,
    "l1": _OF_NUMBERS,
    "huber": _OF_NUMBERS,
    "nt-xent": ("recall_at_1",),
}


def usual_metrics(objective: ObjectiveKind, *, text: bool) -> tuple[MetricName, ...]:
    """What an evaluation gives where the recipe names nothing."""
    if objective == "cross-entropy":
        return ("accuracy", *_OF_TEXT) if text else ("accuracy",)
    return METRICS[objective][:1]


def check(recipe: Recipe) -> None:
    """Raises ValueError, naming the keys of both tables."""
    _data(recipe)
    _objective(recipe)
    _schedule(recipe)
    _evaluation(recipe)
    _roll_back(recipe)
    _best(recipe)


def _data(recipe: Recipe) -> None:
    from clustertrain.config.recipe import LEARNS_FROM

    model, data = recipe.model, recipe.data
    kinds = LEARNS_FROM[model.kind]
    if not model.entry and data.kind not in ("auto", *kinds):
        raise ValueError(f"data.kind = {data.kind!r}: a {model.kind} learns from {' or '.join(kinds)}")
    learned = data.path or BUILT_IN.get(recipe.data_kind, ("",))[0]
    if data.validation_path and data.validation_path == learned:
        raise ValueError(
            f"data.validation_path = {data.validation_path!r} is what is learned from: give others, or data.validation"
        )
    if data.kind == "tokens" and not data.path:
        raise ValueError("data.kind = 'tokens' and no data.path: name the folder of shards")
    if recipe.is_text and 0 < model.max_seq_len < data.seq_len:
        raise ValueError(
            f"data.seq_len = {data.seq_len} is more than the model takes: model.max_seq_len = {model.max_seq_len}"
        )
    if recipe.data_kind == "pairs" and data.path == DIGITS and data.seq_len != DIGIT_HALF:
        raise ValueError(f"data.seq_len = {data.seq_len}: half a digit has {DIGIT_HALF} pixels, so set {DIGIT_HALF}")
    if data.augment.mixup and recipe.objective_kind != "cross-entropy":
        raise ValueError(f"data.augment.mixup mixes classes: objective.kind = {recipe.objective_kind!r} has none")


def _objective(recipe: Recipe) -> None:
    """A module of one's own may give what it likes; the built-in ones give logits of classes, or similarities."""
    if recipe.model.entry:
        return
    right = "nt-xent" if recipe.model.kind == "two-tower" else "cross-entropy"
    if recipe.data_kind != "own" and recipe.objective_kind != right:
        raise ValueError(
            f"objective.kind = {recipe.objective_kind!r}: a {recipe.model.kind} on {recipe.data_kind} is trained by "
            + right
        )


def _schedule(recipe: Recipe) -> None:
    schedule, steps = recipe.schedule, recipe.train.steps
    if schedule.warmup_steps >= steps > 1:
        raise ValueError(
            f"schedule.warmup_steps = {schedule.warmup_steps} is not less than train.steps = {steps}: the rate would "
            "never get to its peak"
        )
    warmup, cooldown = schedule.warmup(steps), schedule.cooldown(steps)
    if schedule.kind == "wsd" and warmup + cooldown > steps:
        raise ValueError(
            f"schedule.warmup_steps = {warmup} and cooldown_steps = {cooldown} are more than train.steps = {steps} "
            "together"
        )
    if schedule.kind == "step" and schedule.milestones and schedule.milestones[-1] >= steps:
        raise ValueError(f"schedule.milestones = {list(schedule.milestones)}: must lie before train.steps = {steps}")
    if schedule.kind == "plateau" and not recipe.data.validates:
        raise ValueError(
            "schedule.kind = 'plateau' follows a validation metric: set data.validation (a share of the samples) or "
            "data.validation_path"
        )
    if schedule.kind == "plateau" and recipe.evaluate_every >= steps:
        raise ValueError(
            f"schedule.kind = 'plateau' and evaluation.every = {recipe.evaluate_every}: of train.steps = {steps} only "
            "the last one is evaluated, and the rate would never fall"
        )
    late = [u.step for u in recipe.optim.unfreeze if u.step >= steps]
    if late:
        raise ValueError(f"optim.unfreeze: step {late[0]} is not before train.steps = {steps}")


def _evaluation(recipe: Recipe) -> None:
    evaluation, possible = recipe.evaluation, METRICS[recipe.objective_kind]
    for name in evaluation.metrics:
        if name not in possible and not recipe.model.entry:
            raise ValueError(
                f"evaluation.metrics: {name!r} cannot be told of objective.kind = {recipe.objective_kind!r}: "
                f"{', '.join(possible)}"
            )


def check_contract(recipe: Recipe, source: str) -> None:
    """What the contract asks of the evaluations. A script makes its own, of which nothing is known here.

    Raises:
        ConfigError: they do not give it; names the keys and ``source``.
    """
    try:
        _contract(recipe)
        slice_checks.check_agreement(recipe)
    except ValueError as e:
        raise ConfigError(f"{source}: {e}") from e


def _contract(recipe: Recipe) -> None:
    contract, validates = recipe.contract, recipe.data.validates
    if contract.metric in _OF_TRAINING and validates:
        raise ValueError(
            f"contract.metric = {contract.metric!r} is one of training, and with data to validate on evaluations "
            f"decide (evaluation.patience, the best checkpoint, status): name {PREFIX}loss or another one of the "
            "validation data, or leave that data out"
        )
    if contract.slices and not validates:
        raise ValueError("contract.slices are of the validation data: set data.validation or data.validation_path")
    for key, scalar in (("contract.metric", contract.metric), ("checkpoint.best", recipe.checkpoint.best)):
        if scalar not in ("", *_OF_TRAINING):
            _measured(recipe, f"{key} = {scalar!r}", scalar.partition(SLICE)[0])


def _measured(recipe: Recipe, key: str, named: str) -> None:
    """Raises ValueError where no evaluation gives what ``key`` has ``named``."""
    known = [f"{PREFIX}loss", *(f"{PREFIX}{m}" for m in recipe.evaluated_metrics)]
    validates = recipe.data.validates
    if f"{PREFIX}{named}" in known:
        raise ValueError(f"{key}: did you mean {PREFIX}{named}?")
    if named.startswith(PREFIX) and not validates:
        raise ValueError(f"{key} is one of the validation data: set data.validation or data.validation_path")
    if named in known:
        return
    if named.startswith(PREFIX) and named.removeprefix(PREFIX) in METRICS[recipe.objective_kind]:
        raise ValueError(f"{key}: name {named.removeprefix(PREFIX)!r} in evaluation.metrics too")
    what = "is none that the evaluation gives" if validates else "is none that is measured without validation data"
    raise ValueError(f"{key} {what}: {nearest(named, [*_OF_TRAINING, *(known if validates else ())])}")


def check_own_loss(recipe: Recipe) -> None:
    """Of a model with a loss of its own, of which nothing is known that could be measured: that what decides is one of
    ``evaluation.metrics``.

    Raises:
        ConfigError: it is not, so that no evaluation would give it.
    """
    for key, scalar in (("contract.metric", recipe.contract.metric), ("checkpoint.best", recipe.checkpoint.best)):
        name = missing_with_own_loss(recipe, scalar)
        if name:
            raise ConfigError(
                f"{key} = {scalar!r}: {recipe.model.entry} has a loss of its own, and then only the metrics that are "
                "named are measured",
                fix=f"set evaluation.metrics = {text_of([*recipe.evaluation.metrics, name])}, or name {PREFIX}loss",
            )


def missing_with_own_loss(recipe: Recipe, scalar: str) -> str:
    """The metric behind ``scalar`` where a model's own loss would leave it unmeasured; else empty."""
    name = scalar.partition(SLICE)[0].removeprefix(PREFIX)
    open_ = recipe.model.entry and recipe.objective.kind == "auto" and recipe.data.validates
    return name if open_ and scalar.startswith(PREFIX) and name not in ("loss", *recipe.evaluation.metrics) else ""


def _best(recipe: Recipe) -> None:
    """One scalar decides, whichever table names it."""
    contract, checkpoint = recipe.contract, recipe.checkpoint
    if contract.metric and checkpoint.best and contract.metric != checkpoint.best:
        raise ValueError(
            f"contract.metric = {contract.metric!r} and checkpoint.best = {checkpoint.best!r}: two scalars would "
            "decide which checkpoint is the best; leave out checkpoint.best"
        )
    same = checkpoint.best in ("", recipe.deciding_metric)
    modes = {contract.mode, checkpoint.best_mode} - {"auto"}
    if same and len(modes) > 1:
        raise ValueError(
            f"contract.mode = {contract.mode!r} and checkpoint.best_mode = {checkpoint.best_mode!r} say the opposite "
            f"of {recipe.deciding_metric}: leave out checkpoint.best_mode"
        )


def _roll_back(recipe: Recipe) -> None:
    """Saves go on while steps are skipped: one from before the first of them must still be there."""
    stability, checkpoint = recipe.stability, recipe.checkpoint
    if not stability.rolls_back or not isinstance(checkpoint.every, int):
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
