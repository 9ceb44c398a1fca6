"""Parameter groups: weight decay where it belongs, rates by depth and by module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn, model_parts
from clustertrain.train.optim.lr_schedule import LR_SCALE
from clustertrain.train.optim.param_info import ParamTable, build_param_table

MATRICES = "matrices"  # in a group of a pair of optimizers: whether it is the first one's
LABEL = "group"  # in a group: what it is called in the log


def parameter_groups(
    model: nn.Module,
    param_table: ParamTable,
    *,
    weight_decay: float,
    layer_decay: float = 1.0,
    lr_scale: Mapping[str, float] | None = None,
    split_hidden: bool = False,
) -> list[dict[str, Any]]:
    """The parameters of ``model`` that are trained on this rank, in groups of the same decay and rate.

    Args:
        known: what :func:`~clustertrain.train.optim.param_info.build_param_table` said of the whole model.
        weight_decay: of matrices; norms, biases, embeddings and single numbers go without.
        layer_decay: the rate of a layer is that of the one above it times this; the head has 1.
        lr_scale: by pattern of module names what the rate is multiplied by; of several that fit the last one counts.
        hidden_apart: mark groups with ``matrices``, true for those of hidden matrices.

    Raises:
        ConfigError: a pattern that fits nothing; ``layer_decay`` of a model whose layers cannot be told.
    """
    param_table.check_layer_decay(layer_decay)
    factors: dict[str, float] = {}
    for pattern, factor in (lr_scale or {}).items():
        factors.update(dict.fromkeys(param_table.match_names(pattern, "optim.lr_scale"), factor))
    grouped: dict[tuple[bool, bool, float], list[nn.Parameter]] = {}
    for name, p in trainable_parameters(model):
        info = param_table.by_name[name]
        scale = layer_decay ** (info.depth or 0) * factors.get(name, 1.0)
        hidden = split_hidden and info.hidden
        grouped.setdefault((hidden, info.decays, scale), []).append(p)
    return [
        {
            "params": params,
            "weight_decay": weight_decay if decays else 0.0,
            LR_SCALE: scale,
            LABEL: _label(hidden, decays, scale),
            **({MATRICES: hidden} if split_hidden else {}),
        }
        for (hidden, decays, scale), params in sorted(grouped.items(), key=lambda item: item[0], reverse=True)
    ]


def groups_for_unsharded(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Of a model that no layout has taken apart."""
    return parameter_groups(model, build_param_table(model), weight_decay=weight_decay)


def _label(hidden: bool, decays: bool, scale: float) -> str:
    labels = ["hidden matrices"] * hidden + ["decay" if decays else "no decay"]
    return ", ".join([*labels, *([f"lr x {scale:.6g}"] if scale != 1.0 else [])])


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """This rank's parameters that are not frozen, each with its name in the whole model. Two stages of one rank may
    each have a copy of what is tied, under one name."""
    return [(clean_fqn(n), p) for part in model_parts(model) for n, p in part.named_parameters() if p.requires_grad]


def groups_for_event(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its groups as the event ``optimizer`` has them."""
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
