"""Requirements of an optimizer and its patterns on the layout and the model."""

from __future__ import annotations

from collections.abc import Sequence

from clustertrain.config.checks.module_patterns import matches, suggest_modules
from clustertrain.config.model import ModelSpec
from clustertrain.config.optim import OptimSpec
from clustertrain.config.optimizers import OPTIMIZERS
from clustertrain.errors import ConfigError
from clustertrain.plan.cost.model_shape import iter_shapes
from clustertrain.plan.layout import Layout

MAX_COUPLED_DECAY = 0.01


def check_modules(spec: OptimSpec, modules: Sequence[str]) -> set[str]:
    """Return those of ``modules`` (the modules with parameters) that are trained at some time.

    Raises:
        ConfigError: a pattern matches no module, or nothing is left to train.
    """
    unfrozen = [p for u in spec.unfreeze for p in u.modules]
    _check_patterns("optim.freeze", spec.freeze, modules)
    _check_patterns("optim.lr_scale", list(spec.lr_scale), modules)
    _check_patterns("optim.weight_decay_scale", list(spec.weight_decay_scale), modules)
    _check_patterns("optim.unfreeze.modules", unfrozen, modules)
    trained_modules = {
        m for m in modules if not any(matches(p, m) for p in spec.freeze) or any(matches(p, m) for p in unfrozen)
    }
    if not trained_modules:
        raise ConfigError("optim.freeze: nothing is left to train", fix="remove a module from it")
    return trained_modules


def _check_patterns(key: str, patterns: Sequence[str], modules: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(matches(pattern, module) for module in modules):
            raise ConfigError(
                f"{key}: no module with parameters matches {pattern!r}", fix=suggest_modules(pattern, modules)
            )


def list_modules(model: ModelSpec) -> list[str]:
    """Return the names of the modules with parameters of a convnet or a two-tower model."""
    if model.kind == "convnet":
        names = ["stem", "stem_norm", "head"]
        for i, (in_width, width, stride) in enumerate(model.convnet.block_shapes()):
            names += [f"blocks.{i}.{name}" for name in ("conv1", "norm1", "conv2", "last_norm")]
            if stride > 1 or in_width != width:
                names += [f"blocks.{i}.{name}" for name in ("project", "project_norm")]
        return names
    tower = [*(module for module, _ in iter_shapes(model) if module != "head"), "project"]
    temperature = [""] if model.two_tower.learn_temperature else []  # a parameter of the model itself
    return [f"{prefix}.{module}" for prefix in ("first", "second") for module in tower] + temperature


def check_optimizer(spec: OptimSpec, layout: Layout, model_kind: str, device: str) -> list[str]:
    """Return notes on settings that work poorly.

    Args:
        model_kind: as ``model.kind``; empty if unknown.

    Raises:
        ConfigError: the optimizer does not support the layout or the model.
    """
    name = spec.name
    if OPTIMIZERS[name].matrices_only and model_kind == "convnet":
        raise ConfigError(
            f"optim.name = {name!r} is for the matrices of hidden layers, which a convnet lacks: its filters have "
            "four dimensions",
            fix="use optim.name = 'sgd' with momentum, 'lars' or 'adamw'",
        )
    if layout.offload and OPTIMIZERS[name].needs_unsharded:
        raise ConfigError(
            f"optim.name = {name!r} with parallel.offload: its update needs whole parameters, which "
            "would be gathered in host memory and updated by the CPUs",
            fix="use optim.name = 'adamw', 'adam', 'sgd' or 'lion', or parallel.offload = false",
        )
    notes = []
    if name == "adamw8bit" and device == "cpu":
        notes.append("optim.name = 'adamw8bit' on the CPU: it runs without torch.compile, slower than adamw")
    elif name == "adamw8bit":
        notes.append(
            "optim.name = 'adamw8bit' compiles its update for each parameter shape: the first step takes up to a "
            "minute longer"
        )
    if OPTIMIZERS[name].has_coupled_decay and spec.weight_decay > MAX_COUPLED_DECAY:
        notes.append(
            f"optim.weight_decay = {spec.weight_decay:g} with optim.name = {name!r}: it is added to the gradient (L2), "
            "while adamw subtracts it from the weights (arXiv 1711.05101): far less is usual here, such as 1e-4"
        )
    if name == "shampoo":
        notes.append(
            "optim.name = 'shampoo' decomposes both sides of every hidden matrix in every step: minutes if they are "
            "thousands wide; soap does so every tenth step"
        )
    return notes
