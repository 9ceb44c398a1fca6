"""A model that is only looked at: after it everything is as it was before, also after an exception."""

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
    """Evaluation mode without gradients. Afterwards each module has the mode that it had, buffers and random generators
    are what they were, and sharded parameters are sharded.

    Inside, all ranks have the first one's persistent buffers, those that a checkpoint keeps: a batch norm has other
    statistics on each data-parallel rank. ``no_grad`` and not ``inference_mode``, whose tensors a model that keeps some
    (a table of positions) could not train with later.
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
    """Each once. Not ``modules()``, which a pipeline has made its own."""
    visited: set[int] = set()
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) not in visited:
            visited.add(id(module))
            yield module
            stack += module.children()


def _reshard(modules: list[nn.Module]) -> None:
    """A backward pass would have done it, or nobody where the layout keeps parameters gathered."""
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
            local = buffer.to_local() if is_dtensor(buffer) else buffer  # type: ignore[attr-defined]
            for dim in reversed(range(mesh.ndim)):
                group = mesh.get_group(dim)
                dist.broadcast(local, src=dist.get_global_rank(group, 0), group=group)
