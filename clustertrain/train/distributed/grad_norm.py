"""The global gradient norm for any layout: plain tensors and DTensors of any mesh, on any pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.checkpoint.core.state_dict import is_dtensor


def local_gradients(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients, which share their memory."""
    return [g.to_local() if is_dtensor(g) else g for p in params if (g := p.grad) is not None]


def reduce_partial_gradients(params: Iterable[nn.Parameter]) -> None:
    """Sum the partial gradients of modules to which tensor parallelism gives only a part of the sequence.

    Call it once per step rather than per micro-batch; ``fully_shard`` reduces its gradients itself.
    """
    for p in params:
        grad: Any = p.grad
        if is_dtensor(grad) and any(placement.is_partial() for placement in grad.placements):
            p.grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]


def replica_count(tensor: torch.Tensor, stages: int = 1) -> int:
    """Return how many ranks hold the same shard of ``tensor`` as this one.

    Args:
        stages: degree of pipeline parallelism, whose ranks hold different parameters.
    """
    ranks = (dist.get_world_size() if dist.is_initialized() else 1) // stages
    if not is_dtensor(tensor):
        return ranks
    mesh, placements = tensor.device_mesh, tensor.placements
    shards: int = math.prod(mesh.size(i) for i, placement in enumerate(placements) if not placement.is_replicate())
    return ranks // shards


def local_squared_norm(
    params: Iterable[nn.Parameter],
    device: torch.device,
    stages: int = 1,
    excluded_ids: Collection[int] = (),
) -> torch.Tensor:
    """Return this rank's share of the squared global L2 norm; the sum over all ranks is the square.

    The result is fp64 on ``device``, without host sync unless gradients are in host memory (``parallel.offload``).

    torch's ``get_total_norm`` needs a collective per mesh. Here, each of n ranks that hold the same shard contributes
    1/n of its square, so one sum over all ranks suffices. That sum can be fused with other values, and is bitwise equal
    on all ranks.

    Args:
        stages: degree of pipeline parallelism, whose ranks hold different parameters.
        excluded_ids: id() of parameters that another stage counts (tied embeddings).
    """
    grads: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for p in params:
        if p.grad is None or id(p) in excluded_ids:
            continue
        grad: Any = p.grad
        key = (replica_count(grad, stages), grad.dtype)
        grads.setdefault(key, []).append(grad.to_local() if is_dtensor(grad) else grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (ranks, _), group in grads.items():
        # fp64, because the sum of squares of scaled fp16 gradients exceeds the range of fp32.
        norms = torch.stack(torch._foreach_norm(group, 2, dtype=torch.float32)).double()
        total = total + (norms.square().sum() / ranks).to(device)
    return total


def total_norm(params: Iterable[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Return the global L2 norm of the gradient as an fp32 tensor on ``device``, equal on all ranks."""
    total = local_squared_norm(params, device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt().float()


def scale_gradients(params: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiply all gradients in place. They are on one device, which with ``parallel.offload`` is the CPU."""
    grads = local_gradients(params)
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0].device) if isinstance(factor, torch.Tensor) else factor)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that reduces a gradient of norm ``norm`` to at most ``max_norm``; 0 disables clipping."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
