"""Construction of an optimizer for the layout, from a class or a name of the registry."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import ParamsT

from clustertrain.checkpoint.core.state_dict import OPTIMIZER_KEY
from clustertrain.errors import ConfigError
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import data_parallel, mesh
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.optim import registry
from clustertrain.train.optim.lr_schedule import LR_SCALE
from clustertrain.train.optim.param_groups import MATRICES, ParamGroups, parameter_groups
from clustertrain.train.optim.param_info import ParamTable
from clustertrain.train.optim.unsharded_update import UnshardedOptimizer
from clustertrain.train.optim.wrapper import OptimizerFactory, OptimizerPair

DEFAULT_WEIGHT_DECAY = 0.1  # for optimizers built by name


def build_optimizer(
    cls_or_name: type[torch.optim.Optimizer] | str,
    params: ParamsT | None,
    options: dict[str, Any],
    *,
    model: nn.Module,
    param_table: ParamTable,
    context: RankContext,
    groups: ProcessGroups,
) -> torch.optim.Optimizer:
    """Build an optimizer that fits the layout. Collective where the layout shards parameters.

    Args:
        cls_or_name: a class, or a name of ``OptimizerName``.
        params: parameters or groups; None means all trainable ones, grouped by weight decay for a name.
        options: keyword arguments of the optimizer.

    Raises:
        ConfigError: the name is unknown, or for a matrix optimizer the groups lack ``matrices`` or the model has none.
        UnsuitableEnvironment: a package is missing.
    """
    is_pair = isinstance(cls_or_name, str) and registry.get_entry(cls_or_name).matrices_only
    cls = registry.load_class(registry.get_entry(cls_or_name)) if isinstance(cls_or_name, str) else cls_or_name
    if params is None and isinstance(cls_or_name, str):
        decay = options.pop("weight_decay", DEFAULT_WEIGHT_DECAY)
        params = parameter_groups(model, param_table, weight_decay=decay, split_hidden=is_pair)
    if params is None:
        params = [p for p in model.parameters() if p.requires_grad]
    param_groups = _as_param_groups(params)
    if isinstance(cls_or_name, str):
        param_groups = [{**group, OPTIMIZER_KEY: cls_or_name} for group in param_groups]
    has_explicit_lr = ["lr" in group for group in param_groups]  # read before the optimizer adds its default
    needs_unsharded = registry.needs_unsharded_params(cls)
    sharded = groups.mesh is not None and (context.layout.is_fully_sharded or context.layout.tp > 1)
    shard_group = (
        mesh.build_shard_group(groups.mesh) if needs_unsharded and sharded and groups.mesh is not None else None
    )
    if sharded:
        options = registry.adapt_to_dtensors(cls, options)
    factory: OptimizerFactory
    plain_factory: registry.OptimizerConstructor = functools.partial(cls, **options)
    if is_pair:
        _check_pair(str(cls_or_name), param_groups, param_table)
        matrix_factory, adamw_factory = registry.split_pair_options(cls, options)
        unsharded_factory: OptimizerFactory = (
            functools.partial(_build_unsharded, make=matrix_factory, group=shard_group) if sharded else matrix_factory
        )
        factory = functools.partial(OptimizerPair, marked=MATRICES, first=unsharded_factory, rest=adamw_factory)
    elif needs_unsharded and sharded:
        factory = functools.partial(_build_unsharded, make=plain_factory, group=shard_group)
    else:
        factory = plain_factory
    if context.layout.strategy == "zero1" and groups.mesh is not None:
        optimizer = data_parallel.build_zero1_optimizer(factory, param_groups)
    else:
        optimizer = factory(param_groups)
    for group, explicit_lr in zip(optimizer.param_groups, has_explicit_lr, strict=True):
        if LR_SCALE in group and not explicit_lr:
            group["lr"] = group["lr"] * group[LR_SCALE]
    return optimizer


def _as_param_groups(params: ParamsT) -> ParamGroups:
    """Return ``params`` as parameter groups; raise ConfigError if this rank has no parameters."""
    entries: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    groups: ParamGroups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    param_groups = [
        {**g, "params": [g["params"]] if isinstance(g["params"], torch.Tensor) else list(g["params"])} for g in groups
    ]
    if not any(group["params"] for group in param_groups):
        raise ConfigError(
            "the optimizer has nothing to train on this rank",
            fix="give each pipeline stage trainable parameters: set parallel.split, or lower pp",
        )
    return param_groups


def _build_unsharded(
    groups: ParamGroups, make: OptimizerFactory, group: dist.ProcessGroup | None
) -> UnshardedOptimizer:
    return UnshardedOptimizer(groups, make, group)


def _check_pair(name: str, groups: ParamGroups, param_table: ParamTable) -> None:
    if not all(MATRICES in group for group in groups):
        raise ConfigError(
            f"optimizer {name!r} trains hidden matrices and AdamW the rest, but the groups lack the key that tells "
            f"them apart ({MATRICES!r})",
            fix=f"leave params out, or get them from session.parameter_groups({name!r}, ...)",
        )
    if not any(info.hidden for info in param_table.by_name.values()):
        raise ConfigError(
            f"optimizer {name!r} trains the matrices of hidden layers, and the model has none",
            fix="use another optimizer: adamw, or sgd for a convolutional network",
        )
