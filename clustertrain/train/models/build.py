"""What a recipe trains: a model, what it learns from, and what it minimises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clustertrain.config.checks import cross_checks
from clustertrain.config.model import ModelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.train.core import entry_points
from clustertrain.train.core.step_types import Loss
from clustertrain.train.data.datasets import build_datasets, build_limits
from clustertrain.train.data.loader import MapStyleDataset
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.models import losses, train_mode
from clustertrain.train.models.convnet import ConvNet
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.models.two_tower import TwoTower


@dataclass(frozen=True)
class TrainingTask:
    """``build_model`` is on the meta device where it can fill its own parameters, else on the CPU. ``validation`` is
    what is
    kept apart, in its own order; None where the recipe keeps nothing apart. ``limits`` is what the model takes of
    either."""

    model: nn.Module
    dataset: MapStyleDataset
    loss: Loss
    validation: MapStyleDataset | None = None
    limits: Limits | None = None
    left_eval_mode: Sequence[str] = ()  # modules that came in evaluation mode and are in training mode now


def build_task(recipe: Recipe, *, inspect_only: bool = False) -> TrainingTask:
    """The task of ``recipe``.

    Args:
        to_look_at: nothing will fill the model, so it is on the meta device wherever it can be built there.

    Raises:
        ConfigError: model and data do not fit each other, or one of them is not there; a key that its loss does not
            read.
    """
    spec = recipe.model
    module = build_model(spec, inspect_only=inspect_only)
    model_loss = find_model_loss(recipe, module)
    limits = build_limits(recipe, module, has_model_loss=model_loss is not None)
    data = build_datasets(recipe, limits)
    loss = losses.build_loss(recipe) if model_loss is None else model_loss
    return TrainingTask(module, data.train, loss, data.validation, limits, train_mode.set_train_mode(module))


def find_model_loss(recipe: Recipe, module: nn.Module) -> Loss | None:
    """What the module ``module`` by an entry brings with it; None where it brings none, or ``recipe`` names a kind,
    which wins over it.

    Raises:
        ConfigError: a key that has no effect with it, or that names what is not measured then.
    """
    candidate: Any = getattr(module, "loss", None)
    if not (recipe.model.entry and callable(candidate) and recipe.objective.kind == "auto"):
        return None
    if recipe.objective.label_smoothing:
        raise ConfigError(
            f"objective.label_smoothing = {recipe.objective.label_smoothing:g} has no effect with the loss of "
            f"{recipe.model.entry}",
            fix='remove it, or set objective.kind = "cross-entropy"',
        )
    cross_checks.check_custom_loss(recipe)
    loss: Loss = candidate
    return loss


def build_model(spec: ModelSpec, *, inspect_only: bool = False) -> nn.Module:
    """Raises as :func:`build_task`."""
    return build_from_entry(spec, inspect_only=inspect_only) if spec.entry else _build_builtin(spec)


def _build_builtin(spec: ModelSpec) -> nn.Module:
    with torch.device("meta"):
        if spec.kind == "convnet":
            return ConvNet(spec.convnet)
        return TwoTower(spec) if spec.kind == "two-tower" else Decoder(spec)


def build_from_entry(spec: ModelSpec, *, inspect_only: bool = False) -> nn.Module:
    """The module that ``build_model.build_from_entry`` makes of ``build_model.args``: on the meta device if it has
    ``init_parameter`` (or nobody wants its values), else on the CPU, with the values that it gives itself.

    Raises:
        ConfigError: there is no such function, it does not take the arguments, or what it returns is no module.
    """
    factory = entry_points.load_function(spec.entry, "model.entry")
    entry_points.check_arguments(factory, spec.entry, spec.args, "model.args")
    try:
        with torch.device("meta"):
            model: Any = factory(**spec.args)
    except RuntimeError:  # it computes with values while it is built, which there are none of
        model = factory(**spec.args)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.entry = {spec.entry!r} returned {type(model).__name__}", fix="return a torch.nn.Module"
        )
    on_meta = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if on_meta and not inspect_only and not callable(getattr(model, "init_parameter", None)):
        on_cpu: nn.Module = factory(**spec.args)
        return on_cpu
    return model
