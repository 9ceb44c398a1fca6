"""Construction of the training task of a recipe: model, datasets and loss."""

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
from clustertrain.train.core import entry_points, step_types
from clustertrain.train.core.step_types import Loss
from clustertrain.train.data.datasets import build_datasets, build_limits
from clustertrain.train.data.loader import MapStyleDataset
from clustertrain.train.data.preferences import PreferencePairs, ReferenceLogProbs
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.data.streams.source import StreamSource
from clustertrain.train.models import losses, outputs, train_mode
from clustertrain.train.models.convnet import ConvNet
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.models.two_tower import TwoTower


@dataclass(frozen=True)
class TrainingTask:
    """Model, data and loss of a run."""

    model: nn.Module
    """On the meta device if it can fill its parameters (``init_parameter``), otherwise on the CPU."""
    dataset: MapStyleDataset | StreamSource
    loss: Loss
    validation: MapStyleDataset | None = None
    """Validation samples in a fixed order; None if the recipe has none."""
    limits: Limits | None = None
    """Input limits of the model, for both datasets."""
    reference: ReferenceLogProbs | None = None
    """Of preference optimization: what the start weights give each answer, computed before the first step."""
    left_eval_mode: Sequence[str] = ()
    """Modules that were built in evaluation mode and have been switched to training mode."""


def build_task(recipe: Recipe, *, shard: tuple[int, int] = (0, 1), inspect_only: bool = False) -> TrainingTask:
    """Build the training task of ``recipe``.

    Args:
        shard: the data-parallel rank and their number, for data that is a stream.
        inspect_only: build the model on the meta device wherever possible, since nothing will fill it.

    Raises:
        ConfigError: the model or data is missing, they do not match, or the loss does not read a key.
    """
    spec = recipe.model
    module = build_model(spec, inspect_only=inspect_only)
    check_document_attention(recipe, module)
    model_loss = find_model_loss(recipe, module)
    limits = build_limits(recipe, module, has_model_loss=model_loss is not None)
    data = build_datasets(recipe, limits, shard)
    loss = losses.build_loss(recipe) if model_loss is None else model_loss
    if spec.entry and model_loss is None:
        outputs.prepare_entry(module)
    pairs = [dataset for dataset in (data.train, data.validation) if isinstance(dataset, PreferencePairs)]
    return TrainingTask(
        module,
        data.train,
        loss,
        data.validation,
        limits,
        ReferenceLogProbs(pairs) if pairs else None,
        train_mode.set_train_mode(module),
    )


def check_document_attention(recipe: Recipe, module: nn.Module) -> None:
    """Raise ConfigError if ``recipe`` masks documents and ``module`` would not know where they start."""
    if not recipe.attends_in_documents or step_types.accepts_document_starts(module):
        return
    raise ConfigError(
        f'data.attention = "document": forward() of {type(module).__name__} has no argument '
        f"{step_types.DOCUMENT_STARTS}",
        fix="add it, and mask attention with SelfAttention.document_mask "
        '(clustertrain.train.distributed.context_parallel); or use data.attention = "sample"',
    )


def find_model_loss(recipe: Recipe, module: nn.Module) -> Loss | None:
    """Return the ``loss`` method of an entry's module; None if it has none, or ``recipe`` names an objective, which
    takes precedence.

    Raises:
        ConfigError: a key has no effect with this loss, or names a metric that it does not provide.
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
    """Build the model of ``spec``; raise as :func:`build_task` does."""
    return build_from_entry(spec, inspect_only=inspect_only) if spec.entry else _build_builtin(spec)


def _build_builtin(spec: ModelSpec) -> nn.Module:
    with torch.device("meta"):
        if spec.kind == "convnet":
            return ConvNet(spec.convnet)
        return TwoTower(spec) if spec.kind == "two-tower" else Decoder(spec)


def build_from_entry(spec: ModelSpec, *, inspect_only: bool = False) -> nn.Module:
    """Call ``model.entry`` with ``model.args`` and return the module.

    It is built on the meta device if it has ``init_parameter`` or ``inspect_only`` is set; otherwise on the CPU, with
    its initial values.

    Raises:
        ConfigError: there is no such function, it does not accept the arguments, or its result is not a module.
    """
    factory = entry_points.load_function(spec.entry, "model.entry")
    entry_points.check_arguments(factory, spec.entry, spec.args, "model.args")
    try:
        with torch.device("meta"):
            model: Any = factory(**spec.args)
    except RuntimeError:  # its constructor needs values, which meta tensors lack
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
