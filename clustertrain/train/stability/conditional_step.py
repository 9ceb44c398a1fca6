"""Let an optimizer move, or not, as a flag on the device says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from clustertrain.checkpoint.core.state_dict import inner_optimizers
from clustertrain.train.optim.wrapper import CompositeOptimizer


def supports_device_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` looks at a flag on the device by itself: torch's fused Adam, AdamW, SGD and Adagrad do, on
    a GPU. For others, and what is made of several, the host must read the flag, and so wait for the device once a
    step."""
    inner, *others = (wrapped.optimizer for wrapped in inner_optimizers(optimizer))
    if others or inner is not optimizer or isinstance(optimizer, CompositeOptimizer):
        return False  # of ZeRO-1 a rank may own nothing that has state yet, and all must take the same way
    params = [p for group in inner.param_groups for p in group["params"]]
    # Until it has its state, it would make some of it of a step that is skipped: SGD's momentum is left unset then.
    return bool(getattr(inner, "_step_supports_amp_scaling", False)) and all(
        p.is_cuda and (p.grad is None or p in inner.state) for p in params
    )


def step_unless(optimizer: torch.optim.Optimizer, skip: torch.Tensor | None) -> None:
    """One step of ``optimizer`` unless ``skip``, a bool on the device that all ranks agree in (None: no). A skipped
    step leaves weights and state as they are, in all bits."""
    if skip is None or not supports_device_skip(optimizer):
        if skip is None or not bool(skip):
            optimizer.step()
        return
    inner: Any = inner_optimizers(optimizer)[0].optimizer
    inner.found_inf = skip.float()
    try:
        optimizer.step()
    finally:
        del inner.found_inf


class RunningStatistics:
    """The running means of batch norms: a forward pass moves them, before anybody knows whether the step counts."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(_running_buffers(model))
        self._saved: list[torch.Tensor] = []

    def save(self) -> None:
        self._saved = [b.clone() for b in self._buffers]

    def restore_where(self, skip: torch.Tensor) -> None:
        """As they were when they were kept, where ``skip``; no host sync."""
        for buffer, saved in zip(self._buffers, self._saved, strict=True):
            buffer.copy_(torch.where(skip, saved, buffer))
        self._saved = []


def _running_buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.buffers(recurse=False)
