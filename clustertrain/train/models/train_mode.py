"""Detection of modules that train in evaluation mode, which some libraries return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def find_eval_mode_modules(model: nn.Module) -> list[str]:
    """Return the names of the outermost modules in evaluation mode with trainable parameters; ``""`` is the model
    itself.

    Frozen modules are excluded, because they are meant to be in that mode.
    """
    return list(_outermost_eval_modules(model, ""))


def _outermost_eval_modules(module: nn.Module, name: str) -> Iterator[str]:
    if not module.training:
        if any(p.requires_grad for p in module.parameters()):
            yield name
        return
    for child_name, child in module.named_children():
        yield from _outermost_eval_modules(child, f"{name}.{child_name}" if name else child_name)


def set_train_mode(model: nn.Module) -> list[str]:
    """Switch the modules of :func:`find_eval_mode_modules` to training mode; return their names."""
    names = find_eval_mode_modules(model)
    for name in names:
        model.get_submodule(name).train()
    return names


def on_first_eval_forward(modules: Sequence[nn.Module], report: Callable[[list[str]], None]) -> None:
    """Report modules in evaluation mode at the first forward pass that records gradients.

    ``report`` receives the names from :func:`find_eval_mode_modules` if there are any. The check waits for that pass
    because a script may set the mode at any time before it.
    """
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
