"""Three ways to keep a gradient from moving the weights too far. All work on whole gradients, whatever the layout: the
global norm is known on every rank, and a limit for elements does not ask where they lie."""

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

ADAPTIVE_WINDOW = 128  # steps whose norms the adaptive limit is a quantile of
MIN_NORMS = 16  # until there are so many, adaptive clipping is clipping at ``norm``


@dataclass(frozen=True)
class Clipping:
    """``norm``: the whole gradient is scaled down to that global norm (0: none). ``value``: each element is brought
    between minus and plus that. ``adaptive``: as norm, with the ``quantile`` of the last norms for a limit (AutoClip,
    arXiv 2007.14469)."""

    mode: ClipMethod = "norm"
    norm: float = 0.0
    value: float = 1.0
    quantile: float = 0.95

    def __post_init__(self) -> None:
        if self.norm < 0 or self.value <= 0 or not 0 < self.quantile <= 1:
            raise UsageError(
                f"{self}: a limit that cannot be", fix="norm at least 0, value above 0, quantile above 0 and up to 1"
            )

    @classmethod
    def from_spec(cls, spec: OptimSpec) -> Clipping:
        """Return the clipping that a recipe's [optim] table sets."""
        return cls(spec.clip, spec.clip_norm, spec.clip_value, spec.clip_quantile)


def compute_norm_limit(clipping: Clipping, norms: RingBuffer, device: torch.device) -> torch.Tensor:
    """The greatest global norm that is left as it is, on the device; inf where there is none."""
    # Filled there: a number that is copied to a GPU makes the host wait for it.
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
    """Multiply all gradients by ``factor`` and clip what results, whose global norm is ``norm``; in place, without a
    host sync. Returns whether anything was clipped: a bool on the device, the same on all ranks."""
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
