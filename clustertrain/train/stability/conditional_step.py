"""Optimizer steps that are skipped if a flag on the device is set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from clustertrain.checkpoint.core.state_dict import inner_optimizers
from clustertrain.train.optim.wrapper import CompositeOptimizer


def supports_device_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` reads a skip flag on the device, as torch's fused optimizers on GPU do.

    These are Adam, AdamW, SGD and Adagrad. For other and composite optimizers the host must read the flag, and thus
    waits for the device once per step.
    """
    inner, *others = (wrapped.optimizer for wrapped in inner_optimizers(optimizer))
    if others or inner is not optimizer or isinstance(optimizer, CompositeOptimizer):
        return False  # in ZeRO-1 a rank may own no parameter with state, and all ranks must decide the same
    params = [p for group in inner.param_groups for p in group["params"]]
    # Without state, a skipped step would create some: SGD's momentum would stay uninitialized.
    return bool(getattr(inner, "_step_supports_amp_scaling", False)) and all(
        p.is_cuda and (p.grad is None or p in inner.state) for p in params
    )


def step_unless(optimizer: torch.optim.Optimizer, skip: torch.Tensor | None) -> None:
    """Run one step of ``optimizer`` unless ``skip`` is set; a skipped step leaves weights and state bitwise unchanged.

    ``skip`` is a bool on the device, equal on all ranks; None: never skip.
    """
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
    """Running statistics of batch norms, which a forward pass changes before it is known if the step is skipped."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(_running_buffers(model))
        self._saved: list[torch.Tensor] = []

    def save(self) -> None:
        """Save a copy of the statistics."""
        self._saved = [b.clone() for b in self._buffers]

    def restore_where(self, skip: torch.Tensor) -> None:
        """Restore the saved values where ``skip`` is set, without a host sync."""
        for buffer, saved in zip(self._buffers, self._saved, strict=True):
            buffer.copy_(torch.where(skip, saved, buffer))
        self._saved = []


def _running_buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.buffers(recurse=False)
