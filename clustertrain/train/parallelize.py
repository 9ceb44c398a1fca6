"""Give a model the plan's layout."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from clustertrain.checkpoint.state import block
from clustertrain.errors import ConfigError
from clustertrain.train import seeds
from clustertrain.train.context import RankContext

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Initialises(Protocol):
    """A model that may be built on the meta device."""

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill ``tensor``, the whole parameter ``name``, using ``generator`` alone."""


def parallelize(model: nn.Module, context: RankContext, mesh: DeviceMesh | None, seed: int) -> nn.Module:
    """Shard or replicate ``model`` and put it on the device.

    On the meta device its parameters are filled by its ``init_parameter``, each whole from (seed, name), so that the
    values do not depend on the layout. Otherwise rank 0's values are taken by all.

    Raises:
        ConfigError: on the meta device without ``init_parameter``, or with buffers.
    """
    on_meta = any(p.is_meta for p in model.parameters())
    if on_meta:
        _check_meta(model)
    if context.layout.strategy == "fsdp" and mesh is not None:
        if not on_meta:
            _take_rank_0(model.to(context.device))
        _shard(model, context, mesh)
    if on_meta:
        model.to_empty(device=context.device)
        _initialise(model, seed)
    model = model.to(context.device)
    return _replicate(model, context) if context.layout.strategy == "ddp" and mesh is not None else model


def _check_meta(model: nn.Module) -> None:
    if not callable(getattr(model, "init_parameter", None)):
        raise ConfigError(
            f"{type(model).__name__} is on the meta device and has no init_parameter(name, tensor, generator)",
            fix="add it, or build the model on the CPU",
        )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ConfigError(f"buffer {name} is on the meta device, nothing would fill it", fix="build it on the CPU")


def _take_rank_0(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def _shard_units(model: nn.Module) -> Iterable[nn.Module]:
    """The repeated layers, which are gathered one at a time: the members of every outermost ModuleList."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _shard_units(child)


def _shard(model: nn.Module, context: RankContext, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = DTYPES[context.precision]
    # Gradients are summed in fp32: in bf16 the sum over many ranks loses what the small ones add.
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    reshard = context.layout.reshard_after_forward
    for unit in _shard_units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def _initialise(model: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            whole = torch.empty(p.shape, dtype=p.dtype, device=p.device)
            generator = torch.Generator(p.device).manual_seed(seeds.derive(seed, "init", name))
            model.init_parameter(name, whole, generator)  # type: ignore[operator]
            part = block(name, "model", p)
            part.local.copy_(whole[tuple(slice(s, s + n) for s, n in zip(part.start, part.local.shape, strict=True))])


class _SumOfParameters(nn.Module):
    """Stands in for the model in one pass that reaches every parameter in the order of registration."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model  # DDP looks for the buffers in it

    def forward(self, _unused: torch.Tensor) -> torch.Tensor:
        return torch.stack([p.sum().float() for p in self.model.parameters() if p.requires_grad]).sum()


def _replicate(model: nn.Module, context: RankContext) -> nn.Module:
    wrapped = DistributedDataParallel(
        model,
        device_ids=[context.device.index] if context.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    # DDP regroups its buckets once, by the order in which the first backward produced gradients, and so sums in another
    # order from the second step on. A resumed run would have its "first step" elsewhere. This pass fixes the order for
    # good before any real step: docs/decisions/0003-ddp-exact-resume.md.
    wrapped.module = _SumOfParameters(model)
    # With an input, because DDP on a GPU takes the first one to its device without looking whether there is one.
    wrapped(torch.zeros((), device=context.device)).backward()
    wrapped.module = model
    for p in model.parameters():
        p.grad = None
    return wrapped


def synchronise_gradients(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Around forward and backward of one micro-batch: gradients travel only with the last one."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    set_sync = getattr(model, "set_requires_gradient_sync", None)
    if callable(set_sync):
        set_sync(last)
    return nullcontext()


def autocast(context: RankContext) -> AbstractContextManager[object]:
    """bf16 for the forward where the layout itself does not cast (FSDP does)."""
    if context.precision == "fp32" or context.layout.strategy == "fsdp":
        return nullcontext()
    return torch.autocast(context.device.type, dtype=DTYPES[context.precision])


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients to a global norm of at most ``max_norm`` (0: leave them) and return the norm before, as a
    tensor on the device. Over shards the norm is that of the whole gradient."""
    params = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    full = getattr(norm, "full_tensor", None)
    return full() if callable(full) else norm
