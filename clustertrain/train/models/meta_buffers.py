"""Buffers of transformers models on the meta device that no checkpoint has, such as rotary frequencies."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def fill(model: nn.Module) -> None:
    """Give the non-persistent buffers of transformers models in ``model`` that are on the meta device their values.

    They are on the CPU then. transformers computes them in ``_init_weights``, which its ``from_pretrained`` calls too
    (transformers 5). Buffers that it does not compute stay on the meta device.
    """
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    if transformers is not None:
        _fill(model, None, transformers.PreTrainedModel)


def _fill(module: nn.Module, owner: Any, owner_type: type) -> None:
    if isinstance(module, owner_type):
        owner = module  # parts of a model may be models of their own, with another initialization
    names = [n for n, b in module.named_buffers(recurse=False) if b.is_meta and n in module._non_persistent_buffers_set]
    # Parameters on the meta device are not drawn; others would lose their values.
    if owner is not None and names and all(p.is_meta for p in module.parameters(recurse=False)):
        _compute(module, owner, names)
    for child in module.children():
        _fill(child, owner, owner_type)


@torch.no_grad()
def _compute(module: nn.Module, owner: Any, names: list[str]) -> None:
    on_meta = {name: module.get_buffer(name) for name in names}
    results = []
    for filling in (0, 1):  # a buffer that still depends on it was not computed
        for name, buffer in on_meta.items():
            setattr(module, name, torch.full_like(buffer, filling, device="cpu"))
        owner._init_weights(module)
        results.append({name: module.get_buffer(name) for name in names})
    for name, buffer in on_meta.items():
        if not torch.equal(results[0][name], results[1][name]):
            setattr(module, name, buffer)
