"""What a recipe trains: a model, what it learns from, and what it minimises."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clustertrain.errors import ConfigError
from clustertrain.spec.data import DataSpec
from clustertrain.spec.models import ConvnetSpec
from clustertrain.spec.recipe import ModelSpec, Recipe
from clustertrain.train import losses
from clustertrain.train.convnet import ConvNet
from clustertrain.train.data import MapStyle
from clustertrain.train.images import images
from clustertrain.train.model import Decoder
from clustertrain.train.step import Loss
from clustertrain.train.text import BytePairs, ByteText
from clustertrain.train.two_tower import TwoTower


@dataclass(frozen=True)
class Task:
    """``model`` is on the meta device where it can fill its own parameters, else on the CPU. ``validation`` is what is
    kept apart, in its own order; None where the recipe keeps nothing apart."""

    model: nn.Module
    dataset: MapStyle
    loss: Loss
    validation: MapStyle | None = None


def task(recipe: Recipe, *, to_look_at: bool = False) -> Task:
    """The task of ``recipe``.

    Args:
        to_look_at: nothing will fill the model, so it is on the meta device wherever it can be built there.

    Raises:
        ConfigError: model and data do not fit each other, or one of them is not there.
    """
    spec = recipe.model
    made = model(spec, to_look_at=to_look_at)
    dataset = _dataset(recipe)
    if spec.kind == "convnet":
        _check_images(dataset, spec.convnet, recipe.data)
    own = getattr(made, "loss", None) if spec.entry else None
    # A kind that is named wins over what the module brings with it.
    loss = own if callable(own) and recipe.objective.kind == "auto" else losses.objective(recipe)
    return Task(made, dataset, loss)


def model(spec: ModelSpec, *, to_look_at: bool = False) -> nn.Module:
    """Raises as :func:`task`."""
    return entry(spec, to_look_at=to_look_at) if spec.entry else _built_in(spec)


def _built_in(spec: ModelSpec) -> nn.Module:
    with torch.device("meta"):
        if spec.kind == "convnet":
            return ConvNet(spec.convnet)
        return TwoTower(spec) if spec.kind == "two-tower" else Decoder(spec)


def _dataset(recipe: Recipe) -> MapStyle:
    if recipe.data_kind == "own":
        found: MapStyle = _function(recipe.data.entry, "data.entry")(**recipe.data.args)
        return found
    if recipe.data_kind == "images":
        return images(recipe.data)
    return BytePairs(recipe.data) if recipe.data_kind == "pairs" else ByteText(recipe.data)


def _check_images(dataset: Any, spec: ConvnetSpec, data: DataSpec) -> None:
    if dataset.classes > spec.classes or dataset.channels != spec.channels:
        raise ConfigError(
            f"data.path = {data.path!r} has {dataset.classes} classes and {dataset.channels} channels, the model "
            f"{spec.classes} and {spec.channels}",
            fix=f"set model.convnet.classes = {dataset.classes}, model.convnet.channels = {dataset.channels}",
        )


def entry(spec: ModelSpec, *, to_look_at: bool = False) -> nn.Module:
    """The module that ``model.entry`` makes of ``model.args``: on the meta device if it has ``init_parameter`` (or
    nobody wants its values), else on the CPU, with the values that it gives itself.

    Raises:
        ConfigError: there is no such function, it does not take the arguments, or what it returns is no module.
    """
    make = _function(spec.entry, "model.entry")
    try:
        inspect.signature(make).bind(**spec.args)
    except TypeError as e:
        raise ConfigError(f"model.args = {spec.args}: {spec.entry}: {e}", fix="give the arguments that it takes") from e
    try:
        with torch.device("meta"):
            model: Any = make(**spec.args)
    except RuntimeError:  # it computes with values while it is built, which there are none of
        model = make(**spec.args)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.entry = {spec.entry!r} returned {type(model).__name__}", fix="return a torch.nn.Module"
        )
    on_meta = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if on_meta and not to_look_at and not callable(getattr(model, "init_parameter", None)):
        made: nn.Module = make(**spec.args)
        return made
    return model


def _function(name: str, key: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module}.".startswith(f"{e.name}."):
            raise  # something that the module itself imports
        raise ConfigError(
            f"{key} = {name!r}: no module {e.name!r}",
            fix="keep it beside the recipe or where submit is called, or install it for the job's Python",
        ) from e
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as e:
            raise ConfigError(f"{key} = {name!r}: {e}", fix="name a function of that module") from e
    if not callable(found):
        raise ConfigError(f"{key} = {name!r} is {type(found).__name__}", fix="name a function or a class")
    return found  # type: ignore[no-any-return]
