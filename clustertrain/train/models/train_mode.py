"""Modules that are trained while they are in evaluation mode, as a library may have handed them over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def find_eval_mode_modules(model: nn.Module) -> list[str]:
    """The names of the outermost modules in evaluation mode that hold parameters to train; the whole model is
    ``""``. A frozen module is in that mode on purpose."""
    return list(_outermost_eval_modules(model, ""))


def _outermost_eval_modules(module: nn.Module, name: str) -> Iterator[str]:
    if not module.training:
        if any(p.requires_grad for p in module.parameters()):
            yield name
        return
    for child_name, child in module.named_children():
        yield from _outermost_eval_modules(child, f"{name}.{child_name}" if name else child_name)


def set_train_mode(model: nn.Module) -> list[str]:
    """Put what :func:`find_eval_mode_modules` finds into training mode; returns the names."""
    names = find_eval_mode_modules(model)
    for name in names:
        model.get_submodule(name).train()
    return names


def on_first_eval_forward(modules: Sequence[nn.Module], report: Callable[[list[str]], None]) -> None:
    """Call ``report`` with the names that :func:`find_eval_mode_modules` finds at the first forward pass that records
    gradients, if there are any. A script may set the mode at any time before it."""
    handles: list[RemovableHandle] = []

    def hook(module: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled():
            return
        while handles:
            handles.pop().remove()
        names = find_eval_mode_modules(module)
        if names:
            report(names)

    handles.extend(part.register_forward_pre_hook(hook) for part in modules)
