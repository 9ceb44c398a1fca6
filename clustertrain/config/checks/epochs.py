"""Keys in epochs: their alternatives in steps, and the steps that follow from the number of training samples.

The steps are computed once, before the run, and stored in its spec. A step trains on the global batch, which no resume
changes, so an epoch stays the same number of steps on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from clustertrain.config.parsing.dotted_keys import value_at
from clustertrain.errors import ConfigError

if TYPE_CHECKING:
    from clustertrain.config.recipe import Recipe

_ROUNDING = 1e-9  # of a step: 0.1 epochs of 30 samples are 3, not 4

# Keys that set the same quantity: at most one of each group may be set.
ALTERNATIVES: tuple[tuple[str, ...], ...] = (
    ("train.epochs", "train.steps"),
    ("schedule.warmup_epochs", "schedule.warmup_ratio", "schedule.warmup_steps"),
    ("schedule.milestone_epochs", "schedule.milestones"),
    ("evaluation.every_epochs", "evaluation.every"),
    ("evaluation.patience_epochs", "evaluation.patience"),
)
_EPOCH_KEYS = tuple(key for group in ALTERNATIVES for key in group if key.endswith("epochs"))


def list_epoch_keys(recipe: Recipe) -> list[str]:
    """Return the keys of ``recipe`` that are set and in epochs."""
    values = {key: _get_value(recipe, key) for key in _EPOCH_KEYS}
    return [key for key, value in values.items() if value or (value is not None and key == "schedule.warmup_epochs")]


def has_epoch_keys(recipe: Recipe) -> bool:
    """Return whether ``recipe`` has a key in epochs."""
    return bool(list_epoch_keys(recipe))


def find_alternatives(document: Mapping[str, Any], group: Sequence[str]) -> list[str]:
    """Return the keys of ``group`` that ``document`` sets to more than "none"."""
    values = {key: value_at(document, key.split(".")) for key in group}
    # A warmup of 0 is a setting; everywhere else 0, -1 and an empty list mean that the key decides nothing.
    return [
        key for key, value in values.items() if value not in (None, -1) and (value or key.startswith("schedule.warmup"))
    ]


def check_alternatives(document: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError if ``document`` sets two keys for the same quantity."""
    for group in ALTERNATIVES:
        present = find_alternatives(document, group)
        if len(present) > 1:
            raise ConfigError(
                f"{source}: {' and '.join(present)} are mutually exclusive: both set the same quantity",
                fix=f"remove {' or '.join(present)}",
            )


def resolve_epochs(recipe: Recipe, samples: int, global_batch: int) -> Recipe:
    """Return ``recipe`` with the steps of its keys in epochs.

    Args:
        samples: training samples.
        global_batch: samples per step.

    Raises:
        ConfigError: the resulting steps contradict each other; the message has the arithmetic.
    """
    per_epoch = samples / global_batch
    train, schedule, evaluation = recipe.train, recipe.schedule, recipe.evaluation
    try:
        if train.epochs:
            train = msgspec.structs.replace(train, steps=_round_up(train.epochs * per_epoch))
        if schedule.warmup_epochs is not None:
            schedule = msgspec.structs.replace(schedule, warmup_steps=round(schedule.warmup_epochs * per_epoch))
        if schedule.milestone_epochs:
            milestones = tuple(round(epoch * per_epoch) for epoch in schedule.milestone_epochs)
            schedule = msgspec.structs.replace(schedule, milestones=milestones)
        if evaluation.every_epochs:
            every = max(1, round(evaluation.every_epochs * per_epoch))
            evaluation = msgspec.structs.replace(evaluation, every=every)
        if evaluation.patience_epochs:
            interval = evaluation.every or max(1, train.steps // 10)
            patience = _round_up(evaluation.patience_epochs * per_epoch / interval)
            evaluation = msgspec.structs.replace(evaluation, patience=patience)
        return msgspec.structs.replace(
            recipe,
            data=msgspec.structs.replace(recipe.data, samples=samples),
            train=train,
            schedule=schedule,
            evaluation=evaluation,
        )
    except ValueError as e:
        raise ConfigError(
            f"{e} (an epoch is {samples} samples / {global_batch} per step = {per_epoch:.4g} steps)",
            fix=f"change {' or '.join(list_epoch_keys(recipe))}, or train.global_batch",
        ) from e


def describe_epochs(recipe: Recipe, global_batch: int) -> str:
    """Return one line about the steps that keys in epochs became, for example ``train.epochs = 3: 169 steps``."""
    steps = {
        "train.epochs": recipe.train.steps,
        "schedule.warmup_epochs": recipe.schedule.warmup_steps,
        "schedule.milestone_epochs": list(recipe.schedule.milestones),
        "evaluation.every_epochs": recipe.evaluation.every,
        "evaluation.patience_epochs": f"{recipe.evaluation.patience} evaluations",
    }
    parts = [f"{key} = {_format_epochs(_get_value(recipe, key))}: {steps[key]}" for key in list_epoch_keys(recipe)]
    per_epoch = recipe.data.samples / global_batch
    return f"{recipe.data.samples} samples / {global_batch} per step = {per_epoch:.4g} steps; {', '.join(parts)}"


def _get_value(recipe: Recipe, key: str) -> Any:
    table, _, name = key.partition(".")
    return getattr(getattr(recipe, table), name)


def _format_epochs(value: Any) -> str:
    return f"[{', '.join(f'{epoch:g}' for epoch in value)}]" if isinstance(value, tuple) else f"{value:g}"


def _round_up(steps: float) -> int:
    return max(1, math.ceil(steps - _ROUNDING))
