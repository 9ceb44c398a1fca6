"""An optimizer that fits the layout, from a class or from the name that a recipe has for it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from clustertrain.checkpoint.core.state_dict import OPTIMIZER
from clustertrain.errors import ConfigError
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import data_parallel, mesh
from clustertrain.train.distributed.mesh import Groups
from clustertrain.train.optim import registry
from clustertrain.train.optim.lr_schedule import LR_SCALE
from clustertrain.train.optim.param_groups import MATRICES, parameter_groups
from clustertrain.train.optim.param_info import Parameters
from clustertrain.train.optim.unsharded_update import Gathered
from clustertrain.train.optim.wrapper import Make, Pair

DEFAULT_DECAY = 0.1  # of optimizers that are asked for by name


def make(
    what: type[torch.optim.Optimizer] | str,
    params: Any,
    options: dict[str, Any],
    *,
    model: nn.Module,
    known: Parameters,
    context: RankContext,
    groups: Groups,
) -> torch.optim.Optimizer:
    """Collective where the layout shards parameters.

    Args:
        what: a class, or a name of ``OptimizerName``.
        params: parameters or groups; None: all that are trained, for a name in groups by weight decay.

    Raises:
        ConfigError: an unknown name; a pair's groups without ``matrices``, or a model that has none.
        EnvironmentNotFit: a package is missing.
    """
    pair = isinstance(what, str) and registry.kind(what).of_matrices
    cls = registry.kind(what).load() if isinstance(what, str) else what
    if params is None and isinstance(what, str):
        decay = options.pop("weight_decay", DEFAULT_DECAY)
        params = parameter_groups(model, known, weight_decay=decay, hidden_apart=pair)
    if params is None:
        params = [p for p in model.parameters() if p.requires_grad]
    given = _listed(params)
    if isinstance(what, str):
        given = [{**group, OPTIMIZER: what} for group in given]
    rated = ["lr" in group for group in given]  # the optimizer writes into them
    whole = registry.needs_whole(cls)
    sharded = groups.mesh is not None and (context.layout.fully_sharded or context.layout.tp > 1)
    sharing = mesh.sharing(groups.mesh) if whole and sharded and groups.mesh is not None else None
    build: Make
    plain: registry.Build = functools.partial(cls, **options)
    if pair:
        _check_pair(str(what), given, known)
        first, rest = registry.parts_of_pair(cls, options)
        shared: Make = functools.partial(_gathered, make=first, group=sharing) if sharded else first
        build = functools.partial(Pair, marked=MATRICES, first=shared, rest=rest)
    elif whole and sharded:
        build = functools.partial(_gathered, make=plain, group=sharing)
    else:
        build = plain
    if context.layout.strategy == "zero1" and groups.mesh is not None:
        made = data_parallel.split_optimizer(build, given)
    else:
        made = build(given)
    for group, own in zip(made.param_groups, rated, strict=True):
        if LR_SCALE in group and not own:
            group["lr"] = group["lr"] * group[LR_SCALE]
    return made


def _listed(params: Any) -> list[dict[str, Any]]:
    """``params`` as groups. Raises ConfigError: there is none on this rank."""
    listed: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    groups: list[dict[str, Any]] = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    made = [
        {**g, "params": [g["params"]] if isinstance(g["params"], torch.Tensor) else list(g["params"])} for g in groups
    ]
    if not any(group["params"] for group in made):
        raise ConfigError(
            "the optimizer has nothing to train on this rank",
            fix="let each pipeline stage have something that is not frozen: parallel.split, or a smaller pp",
        )
    return made


def _gathered(groups: list[dict[str, Any]], make: Make, group: Any) -> Gathered:
    return Gathered(groups, make, group)


def _check_pair(name: str, groups: list[dict[str, Any]], known: Parameters) -> None:
    if not all(MATRICES in group for group in groups):
        raise ConfigError(
            f"optimizer {name!r} is for hidden matrices, with AdamW for the rest, and the groups do not say which are "
            f"which ({MATRICES!r})",
            fix=f"leave params out, or take them from session.parameter_groups({name!r}, ...)",
        )
    if not any(described.hidden for described in known.by_name.values()):
        raise ConfigError(
            f"optimizer {name!r} is for the matrices of hidden layers, and the model has none",
            fix="use another one: adamw, or sgd for a convolutional network",
        )
