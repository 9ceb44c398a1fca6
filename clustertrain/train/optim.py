"""AdamW with weight decay where it belongs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from clustertrain.spec.recipe import Recipe

# By module type and not by name: a norm is a norm whatever it is called.
_NO_DECAY_MODULES = (
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two parameter groups: matrices with decay; norms, biases, embeddings and single numbers without. A parameter that
    several modules share goes without as soon as one of them says so."""
    without: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            scale = p.numel() == 1
            if scale or isinstance(module, _NO_DECAY_MODULES) or name == "bias" or name.endswith("_bias"):
                without[id(p)] = p
    params = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in params if id(p) not in without], "weight_decay": weight_decay},
        {"params": [p for p in params if id(p) in without], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def adamw(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """The options of torch's AdamW."""
    spec, fused = recipe.optim, device.type == "cuda"
    return {
        "lr": spec.lr,
        "betas": spec.betas_for(text=recipe.is_text),
        "eps": spec.eps,
        "fused": fused,
        "foreach": None if fused else True,
    }
