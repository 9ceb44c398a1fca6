"""Adapters in a model: which layers get one, and its initial values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn
from clustertrain.config.adapter import AdapterSpec
from clustertrain.config.checks.module_patterns import list_patterns, matches
from clustertrain.config.parsing.documents import build
from clustertrain.errors import ConfigError
from clustertrain.train.core import seeds
from clustertrain.train.distributed import adapted_linear, low_bit
from clustertrain.train.distributed.adapted_linear import AdaptedLayer, LowRank

KEY = "adapter.target_modules"


def build_spec(target_modules: Sequence[str], **values: Any) -> AdapterSpec:
    """Return the settings that a script passes to ``session.add_adapters``.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """
    patterns = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    return build({**values, "target_modules": patterns}, AdapterSpec, "session.add_adapters", "adapter.")


def add_adapters(model: nn.Module, spec: AdapterSpec, seed: int) -> list[str]:
    """Freeze ``model`` and give the layers that ``spec`` selects an adapter. Return the names of these layers.

    Call it before the model is parallelized. Adapters of a model on the meta device have no values yet; the others are
    drawn from (seed, name), so that all ranks and layouts have the same.

    Raises:
        ConfigError: a pattern matches no Linear layer, or one that cannot have an adapter; the rank exceeds a side of a
            matrix; the model has adapters already.
    """
    if any(True for _ in adapted_linear.iter_adapted(model)):
        raise ConfigError(f"{type(model).__name__} has adapters already", fix="add adapters once")
    names = find_targets(model, spec)
    low_rank = LowRank(spec.rank, spec.scaling, spec.dropout, spec.kind == "dora")
    model.requires_grad_(False)
    low_bit.convert_base(model, spec.base_precision)
    for name in names:
        adapted_linear.adapt_linear(model.get_submodule(name), low_rank)
    if not any(p.is_meta for p in model.parameters()):
        with torch.no_grad():
            for name, module in adapted_linear.iter_adapted(model):
                _draw(f"{name}.", module, seed)
        adapted_linear.fill_magnitudes(model)
    return [clean_fqn(name) for name in names]


def _draw(prefix: str, module: AdaptedLayer, seed: int) -> None:
    for own in adapted_linear.PARAMETER_NAMES:
        p = module._parameters.get(own)
        if p is not None:
            name = prefix + own
            generator = torch.Generator(p.device).manual_seed(seeds.derive_seed(seed, "init", name))
            adapted_linear.init_parameter(name, p, generator)


def find_targets(model: nn.Module, spec: AdapterSpec) -> list[str]:
    """Return the names of the layers of ``model`` that ``spec`` selects; raise as :func:`add_adapters` does."""
    modules = dict(model.named_modules())
    bypassed = set(_list_bypassed(modules))
    linear = {name: m for name, m in modules.items() if isinstance(m, nn.Linear) and name not in bypassed}
    selected: set[str] = set()
    for pattern in spec.target_modules:
        _check_fused(modules, pattern, bypassed)
        found = {name for name in linear if matches(pattern, clean_fqn(name))}
        if not found:
            raise ConfigError(
                f"{KEY}: no Linear layer matches {pattern!r}",
                fix=list_patterns(map(clean_fqn, linear))
                if linear
                else f"{type(model).__name__} has no Linear layer: remove [adapter]",
            )
        selected |= found
    for name, layer in linear.items():
        smaller = min(layer.out_features, layer.in_features)
        if name in selected and spec.rank > smaller:
            raise ConfigError(
                f"adapter.rank = {spec.rank} exceeds the smaller side of {clean_fqn(name)}, a matrix of "
                f"{layer.out_features} x {layer.in_features}",
                fix=f"set it to {smaller} or less, or leave this layer out of target_modules",
            )
    return [name for name in linear if name in selected]


def _list_bypassed(modules: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the names of Linear layers whose forward pass is not called."""
    for name, module in modules.items():
        if isinstance(module, nn.MultiheadAttention):
            yield from (f"{name}.{n}" if name else n for n, m in module.named_modules() if isinstance(m, nn.Linear))


def _check_fused(modules: dict[str, nn.Module], pattern: str, bypassed: set[str]) -> None:
    """Raise ConfigError if ``pattern`` names a module whose matrices are not those of Linear layers."""
    for name, module in modules.items():
        if not fnmatchcase(clean_fqn(name), pattern) or isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd)):
            continue
        fused = [n for n, p in module.named_parameters(recurse=False) if p.dim() >= 2]
        if name in bypassed or (fused and not isinstance(module, nn.Linear)):
            what = "is inside an attention that does not call it" if name in bypassed else f"holds {', '.join(fused)}"
            raise ConfigError(
                f"{KEY}: {pattern!r} matches {clean_fqn(name)}, a {type(module).__name__}, which {what}: only a Linear "
                "layer can have an adapter, not a fused one",
                fix="choose other layers, or split this one into Linear layers in the model",
            )
