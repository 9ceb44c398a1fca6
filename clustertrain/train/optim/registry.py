"""The optimizers of the ``[optim]`` table: which class, with which options, and what it needs of a layout."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from clustertrain.config.optim import OptimizerName, OptimSpec
from clustertrain.config.parsing import nearest
from clustertrain.errors import ConfigError, EnvironmentNotFit

Class = type[torch.optim.Optimizer]
Build = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Kind:
    """``whole``: its update needs whole parameters, not shards. ``of_matrices``: it is for the hidden matrices alone,
    the rest goes to AdamW. ``extra``: what to install where its package is not there."""

    module: str
    name: str
    whole: bool = False
    of_matrices: bool = False
    extra: str = ""

    def load(self) -> Class:
        """Raises EnvironmentNotFit where its package is not installed."""
        try:
            found: Class = getattr(importlib.import_module(self.module), self.name)
        except ImportError as e:
            if not self.extra:
                raise
            raise EnvironmentNotFit(
                f"optimizer {self.name}: {e}", fix=f"pip install 'clustertrain[{self.extra}]' for the job's Python"
            ) from e
        return found


_KEPT = "optimizers"
KINDS: Mapping[OptimizerName, Kind] = {
    "adamw": Kind("torch.optim", "AdamW"),
    "adam": Kind("torch.optim", "Adam"),
    "sgd": Kind("torch.optim", "SGD"),
    "adafactor": Kind("torch.optim", "Adafactor", whole=True),
    "lion": Kind("pytorch_optimizer", "Lion", extra=_KEPT),
    "lamb": Kind("pytorch_optimizer", "Lamb", whole=True, extra=_KEPT),
    "lars": Kind("pytorch_optimizer", "LARS", whole=True, extra=_KEPT),
    "muon": Kind("torch.optim", "Muon", whole=True, of_matrices=True),
    "soap": Kind("pytorch_optimizer", "SOAP", whole=True, extra=_KEPT),
    "shampoo": Kind("pytorch_optimizer", "Shampoo", whole=True, of_matrices=True, extra=_KEPT),
    "adamw8bit": Kind("clustertrain.train.optim.adamw8bit", "AdamW8bit", whole=True, extra=_KEPT),
}


def kind(name: str) -> Kind:
    """Raises ConfigError for a name that is in no recipe."""
    if name not in KINDS:
        raise ConfigError(f"optimizer {name!r} is not known", fix=nearest(name, list(get_args(OptimizerName))))
    return KINDS[name]  # type: ignore[index]


def needs_whole(cls: Class) -> bool:
    """Whether ``cls`` is one of those above whose update needs whole parameters, or made of one."""
    wanted = {k.name for k in KINDS.values() if k.whole}
    return any(
        base.__name__ in wanted and base.__module__.partition(".")[0] in ("torch", "torchao", "pytorch_optimizer")
        for base in cls.__mro__
    )


def options(spec: OptimSpec, *, text: bool, device: torch.device) -> dict[str, Any]:
    """Of ``spec.name``, besides weight decay, which the groups have."""
    fused = device.type == "cuda"
    kernels: dict[str, Any] = {"fused": fused, "foreach": None if fused else True}
    common: dict[str, Any] = {"lr": spec.lr}
    adam: dict[str, Any] = {**common, "betas": spec.betas_for(text=text), "eps": spec.eps}
    momentum = {**common, "momentum": spec.momentum_in_use}
    by_name: Mapping[OptimizerName, dict[str, Any]] = {
        "adamw": {**adam, **kernels},
        "adam": {**adam, **kernels},
        # The fused one wants momentum of all in a group or of none, and what is thawed has none yet.
        "sgd": {**momentum, "nesterov": spec.nesterov, **({"foreach": True} if spec.unfreeze else kernels)},
        "adafactor": common,
        "lion": {**common, "betas": adam["betas"]},
        "lamb": adam,
        "lars": momentum,
        # Moonshot's factor gives its steps the size of AdamW's (arXiv 2502.16982, section 2.2): one rate for both.
        "muon": {**adam, **momentum, **kernels, "adjust_lr_fn": "match_rms_adamw"},
        "soap": adam,
        "shampoo": {**adam, **kernels},
        "adamw8bit": adam,
    }
    return by_name[spec.name]


def taken(cls: Class, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that ``cls`` takes by name."""
    known = inspect.signature(cls).parameters
    return {k: v for k, v in given.items() if k in known}


def parts_of_pair(of_matrices: Class, given: Mapping[str, Any]) -> tuple[Build, Build]:
    """What makes the two optimizers of a pair, AdamW the second one, from options that are for both.

    Raises:
        ConfigError: one that neither takes.
    """
    first, rest = taken(of_matrices, given), taken(torch.optim.AdamW, given)
    unknown = sorted(given.keys() - first.keys() - rest.keys())
    if unknown:
        raise ConfigError(
            f"{of_matrices.__name__} with AdamW takes no {unknown[0]}", fix=nearest(unknown[0], [*first, *rest])
        )
    # AdamW's small constant is for its own denominator; that of a matrix iteration is for a norm.
    first.pop("eps", None)
    return functools.partial(of_matrices, **first), functools.partial(torch.optim.AdamW, **rest)
