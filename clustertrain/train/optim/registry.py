"""The classes of the optimizers and their options from the ``[optim]`` table."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch

from clustertrain import extras
from clustertrain.config.optim import OptimSpec
from clustertrain.config.optimizers import OPTIMIZERS, OptimizerEntry, OptimizerName
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import ConfigError

OptimizerClass = type[torch.optim.Optimizer]
OptimizerConstructor = Callable[..., torch.optim.Optimizer]


def load_class(entry: OptimizerEntry) -> OptimizerClass:
    """Import the class of ``entry``.

    Raises:
        UnsuitableEnvironment: its package is not installed.
    """
    if entry.package:
        extras.require(entry.package, f"optimizer {entry.class_name}")
    cls: OptimizerClass = getattr(importlib.import_module(entry.module), entry.class_name)
    return cls


def get_entry(name: str) -> OptimizerEntry:
    """Return the entry of ``name``; raise ConfigError if it is unknown."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer {name!r} is unknown", fix=did_you_mean(name, list(get_args(OptimizerName))))
    return OPTIMIZERS[name]  # type: ignore[index]


def needs_unsharded_params(cls: OptimizerClass) -> bool:
    """Return whether ``cls`` is, or derives from, an optimizer of the registry that needs full parameters."""
    names = {entry.class_name for entry in OPTIMIZERS.values() if entry.needs_unsharded}
    return any(
        base.__name__ in names and base.__module__.partition(".")[0] in ("torch", "torchao", "pytorch_optimizer")
        for base in cls.__mro__
    )


def build_options(spec: OptimSpec, *, is_text: bool, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of the optimizer ``spec.name``, except weight decay, which is set per group."""
    fused = device.type == "cuda"
    kernels: dict[str, Any] = {"fused": fused, "foreach": None if fused else True}
    common: dict[str, Any] = {"lr": spec.lr}
    adam: dict[str, Any] = {**common, "betas": spec.resolve_betas(is_text=is_text), "eps": spec.eps}
    momentum = {**common, "momentum": spec.effective_momentum}
    by_name: Mapping[OptimizerName, dict[str, Any]] = {
        "adamw": {**adam, **kernels},
        "adam": {**adam, **kernels},
        # Fused SGD needs momentum for all parameters of a group or for none, and parameters just unfrozen have none.
        "sgd": {**momentum, "nesterov": spec.nesterov, **({"foreach": True} if spec.unfreeze else kernels)},
        "adafactor": common,
        "lion": {**common, "betas": adam["betas"]},
        "lamb": adam,
        "lars": momentum,
        # Moonshot's factor makes updates as large as AdamW's (arXiv 2502.16982, section 2.2), so one rate serves both.
        "muon": {**adam, **momentum, **kernels, "adjust_lr_fn": "match_rms_adamw"},
        "soap": adam,
        "shampoo": {**adam, **kernels},
        "adamw8bit": adam,
    }
    return by_name[spec.name]


def adapt_to_dtensors(cls: OptimizerClass, options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` without the fused kernel if torch has none for DTensors."""
    if issubclass(cls, torch.optim.SGD) and options.get("fused"):  # torch 2.13: no sharding strategy for _fused_sgd_
        return {**options, "fused": False, "foreach": True}
    return options


def accepted_options(cls: OptimizerClass, options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options that ``cls`` accepts by name."""
    accepted = inspect.signature(cls).parameters
    return {k: v for k, v in options.items() if k in accepted}


def split_pair_options(
    matrix_cls: OptimizerClass, options: Mapping[str, object]
) -> tuple[OptimizerConstructor, OptimizerConstructor]:
    """Return the constructors of a pair, the matrix optimizer and AdamW, from options for both.

    Raises:
        ConfigError: neither accepts an option.
    """
    matrix_options, adamw_options = accepted_options(matrix_cls, options), accepted_options(torch.optim.AdamW, options)
    unknown = sorted(options.keys() - matrix_options.keys() - adamw_options.keys())
    if unknown:
        raise ConfigError(
            f"{matrix_cls.__name__} with AdamW has no option {unknown[0]!r}",
            fix=did_you_mean(unknown[0], [*matrix_options, *adamw_options]),
        )
    # AdamW's eps is for its denominator; a matrix iteration's eps is for a norm and has another scale.
    matrix_options.pop("eps", None)
    return functools.partial(matrix_cls, **matrix_options), functools.partial(torch.optim.AdamW, **adamw_options)
