"""Checks of adapters against the other tables, and against the layers of a built-in model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertrain import settings
from clustertrain.config.checks.module_patterns import list_patterns, matches
from clustertrain.config.huggingface import tensor_names
from clustertrain.config.low_bit import BLOCK
from clustertrain.config.model import ModelSpec
from clustertrain.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from clustertrain.config.recipe import Recipe


def check_adapter(recipe: Recipe) -> None:
    """Raise ValueError, with the keys, if other tables contradict ``[adapter]`` or the model has no such layers."""
    spec, optim = recipe.adapter, recipe.optim
    if not spec.is_enabled:
        return
    for key, patterns in (("optim.freeze", optim.freeze), ("optim.unfreeze", optim.unfreeze)):
        if patterns:
            raise ValueError(
                f"{key} and adapter.kind = {spec.kind!r}: adapters freeze the whole model: "
                f"remove {key}, and choose the layers with adapter.target_modules"
            )
    if recipe.train.precision == "fp8":
        raise ValueError(
            f"train.precision = 'fp8' and adapter.kind = {spec.kind!r}: adapted layers have no 8-bit matmuls: "
            "use train.precision = 'bf16'"
        )
    if recipe.model.entry:
        return
    if recipe.model.kind == "convnet" and spec.base_precision != "unchanged":
        raise ValueError(
            f"adapter.base_precision = {spec.base_precision!r}: the layers of a convnet are convolutions, and only "
            "Linear layers can be stored in fewer bits: remove it"
        )
    find_targets(recipe)


def check_base(recipe: Recipe, tp: int) -> None:
    """Raise ConfigError if the matrices of a built-in decoder in 8 or 4 bits cannot be split over ``tp`` ranks."""
    spec, model = recipe.adapter, recipe.model
    if tp == 1 or spec.base_precision not in ("int8", "nf4") or not model.is_decoder:
        return
    widths = {"model.heads x head size": model.attention_dim, "model.ffn_dim": model.hidden}
    cut = [
        f"{key} = {width} ({width} / {tp} = {width / tp:g})" for key, width in widths.items() if width % (BLOCK * tp)
    ]
    if cut:
        fitting = [str(n) for n in range(2, tp) if not any(width % (BLOCK * n) for width in widths.values())]
        degrees = f"--tp {' or '.join(fitting)}, " if fitting else ""
        raise ConfigError(
            f"adapter.base_precision = {spec.base_precision!r} with tp {tp}: {BLOCK} weights of a row share a scale, "
            f"and tp would cut such a block of {', '.join(cut)}",
            fix=f"use {degrees}adapter.base_precision = 'bf16', or fsdp instead of tp",
        )


def find_targets(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Return the shapes (outputs, inputs) of the layers of a built-in model that get an adapter, by name.

    Raises:
        ValueError: a pattern matches no layer, or the rank is too high for one.
    """
    spec, layers = recipe.adapter, list_linear_layers(recipe.model)
    targets: dict[str, tuple[int, ...]] = {}
    for pattern in spec.target_modules:
        found = {name: shape for name, shape in layers.items() if matches(pattern, name)}
        if not found:
            raise ValueError(
                f"adapter.target_modules: no Linear layer of the {recipe.model.kind} matches {pattern!r}: "
                + list_patterns(layers)
            )
        targets |= found
    for name, shape in targets.items():
        if spec.rank > min(shape):
            raise ValueError(
                f"adapter.rank = {spec.rank} exceeds the smaller side of {name}, a matrix of {shape[0]} x {shape[1]}: "
                f"set it to {min(shape)} or less, or leave this layer out of adapter.target_modules"
            )
    return {name: targets[name] for name in layers if name in targets}


def list_linear_layers(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes (outputs, inputs) of the Linear layers of a built-in model by name."""
    if model.kind == "convnet":
        return {"head": (model.convnet.classes, model.convnet.block_shapes()[-1][1])}
    matrices: dict[str, tuple[int, ...]] = {
        name.removesuffix(".weight"): shape
        for name, (_, shape) in tensor_names.list_tensors(model).items()
        if len(shape) == 2 and name != "embed.weight"
    }
    if model.kind == "decoder":
        return matrices
    tower = {name: shape for name, shape in matrices.items() if name != "head"}
    tower["project"] = (model.two_tower.embedding, model.dim)
    return {f"{side}.{name}": shape for side in ("first", "second") for name, shape in tower.items()}


def resolve_init(document: dict[str, Any], cwd: Path) -> dict[str, Any]:
    """Return a recipe's document with the path of ``adapter.init`` made absolute.

    Raises:
        NotFound: there is no such folder on this machine.
    """
    adapter = document.get("adapter")
    if not isinstance(adapter, dict) or not isinstance(adapter.get("init"), str) or not adapter["init"]:
        return document
    path = cwd / settings.expand_user_path(adapter["init"], "adapter.init")
    if not path.is_dir():
        raise NotFound(
            f"adapter.init = {adapter['init']!r}: no such folder",
            fix="check the path; this machine and every node must see it",
        )
    return {**document, "adapter": {**adapter, "init": str(path)}}
