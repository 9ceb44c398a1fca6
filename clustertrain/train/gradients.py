"""The global gradient norm, whatever the layout: plain tensors and DTensors of any meshes, on any pipeline stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from clustertrain.checkpoint.state import is_dtensor


def local_gradients(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's parts; they share their memory with the gradients."""
    return [g.to_local() if is_dtensor(g) else g for p in params if (g := p.grad) is not None]  # type: ignore[attr-defined]


def complete(params: Iterable[nn.Parameter]) -> None:
    """Sum what tensor parallel left as one part a rank: the gradients of what works on a part of the sequence. Once a
    step and not with each micro-batch; ``fully_shard`` has done it for its own."""
    for p in params:
        grad: Any = p.grad
        if is_dtensor(grad) and any(placement.is_partial() for placement in grad.placements):
            p.grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]


def total_norm(
    params: Iterable[nn.Parameter],
    device: torch.device,
    stages: DeviceMesh | None = None,
    elsewhere: Collection[int] = (),
) -> torch.Tensor:
    """The L2 norm of the whole gradient, as an fp32 tensor on ``device`` and the same on all ranks; no host sync, save
    for gradients in host memory (``parallel.offload``), whose squares are summed there and then sent to the device.

    torch's ``get_total_norm`` takes one mesh at a time. Here the squares of what shares a mesh and its sharded
    dimensions are summed on the rank, then over those dimensions, then over ``stages``.

    Args:
        stages: the pipeline's mesh.
        elsewhere: id() of parameters that another stage counts (tied embeddings).
    """
    squares: dict[Any, torch.Tensor] = {}
    for p in params:
        if p.grad is None or id(p) in elsewhere:
            continue
        sharded: tuple[tuple[DeviceMesh, int], ...] = ()
        grad: Any = p.grad
        if is_dtensor(grad):
            mesh = grad.device_mesh
            sharded = tuple((mesh, i) for i, placement in enumerate(grad.placements) if not placement.is_replicate())
            grad = grad.to_local()
        # In fp64: the sum of squares of scaled fp16 gradients leaves the range of fp32.
        square = torch.linalg.vector_norm(grad, dtype=torch.float32).double().square()
        squares[sharded] = squares[sharded] + square if sharded in squares else square
    total = torch.zeros((), dtype=torch.float64, device=device)
    for sharded, square in squares.items():
        square = square.to(device)  # noqa: PLW2901 - where the ranks of a mesh talk to each other
        for mesh, dim in sharded:
            dist.all_reduce(square, group=mesh.get_group(dim))
        total = total + square
    if stages is not None:
        dist.all_reduce(total, group=stages.get_group())
    return total.sqrt().float()


def scale(params: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiply all gradients, in place. They are all on one device, which with ``parallel.offload`` is the CPU."""
    grads = local_gradients(params)
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0].device) if isinstance(factor, torch.Tensor) else factor)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What brings a gradient of that norm down to ``max_norm`` (0: leaves it)."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
