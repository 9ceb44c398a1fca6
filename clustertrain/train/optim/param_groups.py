"""Parameter groups by weight decay, depth and module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn, model_parts
from clustertrain.train.optim.lr_schedule import LR_SCALE
from clustertrain.train.optim.param_info import ParamTable, build_param_table

ParamGroups = list[dict[str, Any]]

MATRICES = "matrices"  # key in a group of an optimizer pair: whether it belongs to the matrix optimizer
LABEL = "group"  # key in a group: its name in the log


def parameter_groups(
    model: nn.Module,
    param_table: ParamTable,
    *,
    weight_decay: float,
    layer_decay: float = 1.0,
    lr_scale: Mapping[str, float] | None = None,
    weight_decay_scale: Mapping[str, float] | None = None,
    split_hidden: bool = False,
) -> ParamGroups:
    """Return the trainable parameters of ``model`` on this rank, grouped by weight decay and learning-rate factor.

    Args:
        param_table: result of :func:`~clustertrain.train.optim.param_info.build_param_table` for the whole model.
        weight_decay: of matrices; norms, biases, embeddings and scalars have none.
        layer_decay: factor of a layer's rate relative to the layer above; the head has 1.
        lr_scale: factors of the rate by pattern of module names; the last match applies.
        weight_decay_scale: factors of the weight decay, likewise.
        split_hidden: add the key ``matrices``, true for groups of hidden matrices.

    Raises:
        ConfigError: a pattern matches nothing, or ``layer_decay`` is set for a model with unknown layers.
    """
    param_table.check_layer_decay(layer_decay)
    lr_factors = _factors_by_name(param_table, lr_scale, "optim.lr_scale")
    decay_factors = _factors_by_name(param_table, weight_decay_scale, "optim.weight_decay_scale")
    grouped: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for name, p in trainable_parameters(model):
        info = param_table.by_name[name]
        scale = layer_decay ** (info.depth or 0) * lr_factors.get(name, 1.0)
        hidden = split_hidden and info.hidden
        decay_factor = decay_factors.get(name, 1.0) if info.decays else 0.0
        grouped.setdefault((hidden, decay_factor, scale), []).append(p)
    return [
        {
            "params": params,
            "weight_decay": weight_decay * decay_factor,
            LR_SCALE: scale,
            LABEL: _label(hidden, decay_factor, scale),
            **({MATRICES: hidden} if split_hidden else {}),
        }
        for (hidden, decay_factor, scale), params in sorted(grouped.items(), key=lambda item: item[0], reverse=True)
    ]


def groups_for_unsharded(model: nn.Module, weight_decay: float) -> ParamGroups:
    """Return the groups of a model that is not parallelized."""
    return parameter_groups(model, build_param_table(model), weight_decay=weight_decay)


def _factors_by_name(param_table: ParamTable, factors: Mapping[str, float] | None, key: str) -> dict[str, float]:
    """Return the factor of each matched parameter by name; the last pattern that matches applies."""
    by_name: dict[str, float] = {}
    for pattern, factor in (factors or {}).items():
        by_name.update(dict.fromkeys(param_table.match_names(pattern, key), factor))
    return by_name


def _label(hidden: bool, decay_factor: float, scale: float) -> str:
    decay = "no decay" if not decay_factor else "decay" if decay_factor == 1.0 else f"decay x {decay_factor:.6g}"
    labels = ["hidden matrices"] * hidden + [decay]
    return ", ".join([*labels, *([f"lr x {scale:.6g}"] if scale != 1.0 else [])])


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return this rank's trainable parameters with their names in the whole model.

    Two pipeline stages of one rank may each hold a copy of a tied parameter, under one name.
    """
    return [(clean_fqn(n), p) for part in model_parts(model) for n, p in part.named_parameters() if p.requires_grad]


def groups_for_event(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a summary of the optimizer's groups for the event ``optimizer``."""
    return [
        {
            "group": group.get(LABEL, str(i)),
            "tensors": len(group["params"]),
            "parameters": sum(p.numel() for p in group["params"]),
            "weight_decay": group.get("weight_decay", 0.0),
            "lr_scale": group.get(LR_SCALE, 1.0),
        }
        for i, group in enumerate(optimizer.param_groups)
    ]
