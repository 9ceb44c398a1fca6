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
from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import ConfigError, UnsuitableEnvironment

OptimizerClass = type[torch.optim.Optimizer]
OptimizerConstructor = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerEntry:
    """``needs_unsharded``: its update needs whole parameters, not shards. ``matrices_only``: it is for the hidden
    matrices alone, the rest goes to AdamW. ``extra``: what to install where its package is not there."""

    module: str
    name: str
    needs_unsharded: bool = False
    matrices_only: bool = False
    extra: str = ""

    def load(self) -> OptimizerClass:
        """Raises UnsuitableEnvironment where its package is not installed."""
        try:
            cls: OptimizerClass = getattr(importlib.import_module(self.module), self.name)
        except ImportError as e:
            if not self.extra:
                raise
            raise UnsuitableEnvironment(
                f"optimizer {self.name}: {e}", fix=f"pip install 'clustertrain[{self.extra}]' for the job's Python"
            ) from e
        return cls


_EXTRA = "optimizers"
OPTIMIZERS: Mapping[OptimizerName, OptimizerEntry] = {
    "adamw": OptimizerEntry("torch.optim", "AdamW"),
    "adam": OptimizerEntry("torch.optim", "Adam"),
    "sgd": OptimizerEntry("torch.optim", "SGD"),
    "adafactor": OptimizerEntry("torch.optim", "Adafactor", needs_unsharded=True),
    "lion": OptimizerEntry("pytorch_optimizer", "Lion", extra=_EXTRA),
    "lamb": OptimizerEntry("pytorch_optimizer", "Lamb", needs_unsharded=True, extra=_EXTRA),
    "lars": OptimizerEntry("pytorch_optimizer", "LARS", needs_unsharded=True, extra=_EXTRA),
    "muon": OptimizerEntry("torch.optim", "Muon", needs_unsharded=True, matrices_only=True),
    "soap": OptimizerEntry("pytorch_optimizer", "SOAP", needs_unsharded=True, extra=_EXTRA),
    "shampoo": OptimizerEntry("pytorch_optimizer", "Shampoo", needs_unsharded=True, matrices_only=True, extra=_EXTRA),
    "adamw8bit": OptimizerEntry("clustertrain.train.optim.adamw8bit", "AdamW8bit", needs_unsharded=True, extra=_EXTRA),
}


def get_entry(name: str) -> OptimizerEntry:
    """Raises ConfigError for a name that is in no recipe."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer {name!r} is not known", fix=did_you_mean(name, list(get_args(OptimizerName))))
    return OPTIMIZERS[name]  # type: ignore[index]


def needs_unsharded_params(cls: OptimizerClass) -> bool:
    """Whether ``cls`` is one of those above whose update needs whole parameters, or made of one."""
    names = {k.name for k in OPTIMIZERS.values() if k.needs_unsharded}
    return any(
        base.__name__ in names and base.__module__.partition(".")[0] in ("torch", "torchao", "pytorch_optimizer")
        for base in cls.__mro__
    )


def build_options(spec: OptimSpec, *, is_text: bool, device: torch.device) -> dict[str, Any]:
    """Of ``spec.name``, besides weight decay, which the groups have."""
    fused = device.type == "cuda"
    kernels: dict[str, Any] = {"fused": fused, "foreach": None if fused else True}
    common: dict[str, Any] = {"lr": spec.lr}
    adam: dict[str, Any] = {**common, "betas": spec.resolve_betas(is_text=is_text), "eps": spec.eps}
    momentum = {**common, "momentum": spec.effective_momentum}
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


def accepted_options(cls: OptimizerClass, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that ``cls`` takes by name."""
    accepted = inspect.signature(cls).parameters
    return {k: v for k, v in options.items() if k in accepted}


def split_pair_options(
    matrix_cls: OptimizerClass, options: Mapping[str, Any]
) -> tuple[OptimizerConstructor, OptimizerConstructor]:
    """What makes the two optimizers of a pair, AdamW the second one, from options that are for both.

    Raises:
        ConfigError: one that neither takes.
    """
    matrix_options, adamw_options = accepted_options(matrix_cls, options), accepted_options(torch.optim.AdamW, options)
    unknown = sorted(options.keys() - matrix_options.keys() - adamw_options.keys())
    if unknown:
        raise ConfigError(
            f"{matrix_cls.__name__} with AdamW takes no {unknown[0]}",
            fix=did_you_mean(unknown[0], [*matrix_options, *adamw_options]),
        )
    # AdamW's small constant is for its own denominator; that of a matrix iteration is for a norm.
    matrix_options.pop("eps", None)
    return functools.partial(matrix_cls, **matrix_options), functools.partial(torch.optim.AdamW, **adamw_options)
