"""Evaluation mode that restores the model's previous state, even after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.train.core import seeds
from clustertrain.train.distributed.mesh import ProcessGroups


@contextmanager
def evaluation_mode(model: nn.Module, groups: ProcessGroups, device: torch.device) -> Iterator[None]:
    """Run the block in evaluation mode without gradients.

    Afterwards, module modes, buffers and random generators are restored, and sharded parameters are resharded. Inside,
    all ranks use the first data-parallel rank's persistent buffers (those in checkpoints), because batch-norm
    statistics differ between ranks. Gradients are disabled with ``no_grad``, because a model could not train with
    tensors (such as rotary tables) that it cached in ``inference_mode``.
    """
    modules = list(_walk_modules(model))
    modes = [(m, m.training) for m in modules]
    saved_buffers = [
        (m, name, b, b.detach().clone()) for m in modules for name, b in m._buffers.items() if b is not None
    ]
    rng_state = seeds.capture_rng_state(device)
    try:
        model.eval()
        with torch.no_grad():
            _broadcast_buffers(modules, groups)
            yield
    finally:
        for m, training in modes:
            m.training = training
        with torch.no_grad():
            for m, name, buffer, value in saved_buffers:
                m._buffers[name] = buffer.copy_(value)
        seeds.restore_rng_state(rng_state, device)
        if groups.mesh is not None:
            _reshard(modules)


def _walk_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield each module once; a pipeline overrides ``modules()``."""
    visited: set[int] = set()
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) not in visited:
            visited.add(id(module))
            yield module
            stack += module.children()


def _reshard(modules: list[nn.Module]) -> None:
    """Reshard parameters, as a backward pass would unless the layout keeps them gathered."""
    from torch.distributed.fsdp import FSDPModule

    for m in modules:
        if isinstance(m, FSDPModule):
            m.reshard()


def _broadcast_buffers(modules: list[nn.Module], groups: ProcessGroups) -> None:
    mesh = groups.dp_mesh()
    if mesh is None or mesh.size() == 1:
        return
    for m in modules:
        for name, buffer in m._buffers.items():
            if buffer is None or name in m._non_persistent_buffers_set:
                continue
            local = buffer.to_local() if is_dtensor(buffer) else buffer
            for dim in reversed(range(mesh.ndim)):
                group = mesh.get_group(dim)
                dist.broadcast(local, src=dist.get_global_rank(group, 0), group=group)
