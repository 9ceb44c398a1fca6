"""The global gradient norm, whatever the layout: plain tensors and DTensors of any meshes, on any pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.checkpoint.core.state_dict import is_dtensor


def local_gradients(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's parts; they share their memory with the gradients."""
    return [g.to_local() if is_dtensor(g) else g for p in params if (g := p.grad) is not None]  # type: ignore[attr-defined]


def reduce_partial_gradients(params: Iterable[nn.Parameter]) -> None:
    """Sum what tensor parallel left as one part a rank: the gradients of what works on a part of the sequence. Once a
    step and not with each micro-batch; ``fully_shard`` has done it for its own."""
    for p in params:
        grad: Any = p.grad
        if is_dtensor(grad) and any(placement.is_partial() for placement in grad.placements):
            p.grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]


def replica_count(tensor: torch.Tensor, stages: int = 1) -> int:
    """How many ranks hold the same part of ``tensor`` as this one. ``stages``: the degree of pipeline parallel, whose
    ranks hold different parameters."""
    ranks = (dist.get_world_size() if dist.is_initialized() else 1) // stages
    if not is_dtensor(tensor):
        return ranks
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    shards: int = math.prod(mesh.size(i) for i, placement in enumerate(placements) if not placement.is_replicate())
    return ranks // shards


def local_squared_norm(
    params: Iterable[nn.Parameter],
    device: torch.device,
    stages: int = 1,
    excluded_ids: Collection[int] = (),
) -> torch.Tensor:
    """This rank's share of the square of the whole gradient's L2 norm: the sum over all ranks is the square. fp64 on
    ``device``; no host sync, save for gradients in host memory (``parallel.offload``).

    torch's ``get_total_norm`` takes one mesh at a time, and asks each apart. Here what several ranks hold counts with
    each of them for its part, so that one sum over all ranks does, which can travel with other figures, and has the
    same bits everywhere.

    Args:
        stages: the degree of pipeline parallel, whose ranks hold different parameters.
        elsewhere: id() of parameters that another stage counts (tied embeddings).
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
        # In fp64: the sum of squares of scaled fp16 gradients leaves the range of fp32.
        norms = torch.stack(torch._foreach_norm(group, 2, dtype=torch.float32)).double()
        total = total + (norms.square().sum() / ranks).to(device)
    return total


def total_norm(params: Iterable[nn.Parameter], device: torch.device) -> torch.Tensor:
    """The L2 norm of the whole gradient, as an fp32 tensor on ``device`` and the same on all ranks."""
    total = local_squared_norm(params, device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt().float()


def scale_gradients(params: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiply all gradients, in place. They are all on one device, which with ``parallel.offload`` is the CPU."""
    grads = local_gradients(params)
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0].device) if isinstance(factor, torch.Tensor) else factor)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What brings a gradient of that norm down to ``max_norm`` (0: leaves it)."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
