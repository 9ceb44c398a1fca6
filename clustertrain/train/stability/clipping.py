"""Gradient clipping by norm, by value, or by an adaptive norm.

In every layout, all modes act on the global gradient: each rank knows the global norm, and the limit of an element does
not depend on where it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.config.optim import ClipMethod, OptimSpec
from clustertrain.errors import UsageError
from clustertrain.train.distributed import grad_norm
from clustertrain.train.stability.ring_buffer import RingBuffer

ADAPTIVE_WINDOW = 128  # recent steps whose norms determine the adaptive limit
MIN_NORMS = 16  # with fewer norms, adaptive clipping clips at ``norm``


@dataclass(frozen=True)
class Clipping:
    """Clipping mode and limits."""

    mode: ClipMethod = "norm"
    norm: float = 0.0
    """Global norm to which the gradient is scaled down; 0 disables it."""
    value: float = 1.0
    """Bound of the absolute value of each element in mode ``value``."""
    quantile: float = 0.95
    """Quantile of recent norms that limits the norm in mode ``adaptive`` (AutoClip, arXiv 2007.14469)."""

    def __post_init__(self) -> None:
        if self.norm < 0 or self.value <= 0 or not 0 < self.quantile <= 1:
            raise UsageError(
                f"{self}: a limit is out of range",
                fix="use norm >= 0, value > 0, and quantile above 0 and at most 1",
            )

    @classmethod
    def from_spec(cls, spec: OptimSpec) -> Clipping:
        """Return the clipping that a recipe's [optim] table sets."""
        return cls(spec.clip, spec.clip_norm, spec.clip_value, spec.clip_quantile)


def compute_norm_limit(clipping: Clipping, norms: RingBuffer, device: torch.device) -> torch.Tensor:
    """Return the largest global norm left unclipped, on the device; inf without a limit."""
    # Filled on the device, because copying a number to a GPU makes the host wait.
    fixed_limit = torch.full((), clipping.norm or float("inf"), device=device)
    if clipping.mode == "value":
        return torch.full_like(fixed_limit, float("inf"))
    if clipping.mode == "norm":
        return fixed_limit
    return torch.where(norms.count() >= MIN_NORMS, norms.quantile(clipping.quantile), fixed_limit)


def scale_and_clip(
    clipping: Clipping,
    params: Iterable[nn.Parameter],
    factor: torch.Tensor,
    norm: torch.Tensor,
    norm_limit: torch.Tensor,
) -> torch.Tensor:
    """Multiply all gradients by ``factor`` and clip the result, in place and without a host sync.

    Args:
        norm: global norm of the gradients multiplied by ``factor``.
        norm_limit: see :func:`compute_norm_limit`.

    Returns:
        Whether anything was clipped: a bool on the device, equal on all ranks.
    """
    params = list(params)
    if clipping.mode == "value":
        grad_norm.scale_gradients(params, factor)
        return _clamp_elements(params, clipping.value, norm)
    grad_norm.scale_gradients(params, factor * torch.clamp(norm_limit / (norm + 1e-6), max=1.0))
    return norm > norm_limit


def _clamp_elements(params: list[nn.Parameter], value: float, norm: torch.Tensor) -> torch.Tensor:
    # A shard may be empty.
    grads = [g for g in grad_norm.local_gradients(params) if g.numel()]
    max_abs = torch.zeros((), device=norm.device)
    if grads:
        max_abs = torch.stack(torch._foreach_norm(grads, float("inf"))).max().to(norm)
        torch._foreach_clamp_max_(grads, value)
        torch._foreach_clamp_min_(grads, -value)
    if dist.is_initialized():
        dist.all_reduce(max_abs, op=dist.ReduceOp.MAX)
    return max_abs > value
