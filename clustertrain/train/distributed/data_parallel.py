"""Replication and sharding over the data-parallel ranks, and the ZeRO-1 optimizer for replicas."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from clustertrain.errors import ConfigError, UnsuitableEnvironment
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed.precision import parameter_dtype

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # have no forward pass


def repeated_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the repeated layers by name: the units of gathering, checkpointing and compilation.

    They are the members of each outermost ModuleList or ModuleDict without such a container among its members.
    (nanoGPT's ``transformer`` is a ModuleDict that holds the list of layers.)
    """
    for name, child in model.named_children():
        if isinstance(child, _CONTAINERS) and not any(isinstance(m, _CONTAINERS) for m in child.children()):
            yield from ((f"{name}.{n}", m) for n, m in child.named_children())
        else:
            yield from ((f"{name}.{n}", m) for n, m in repeated_layers(child))


def shard(model: nn.Module, context: RankContext, mesh: DeviceMesh) -> None:
    """Apply ``fully_shard`` to each repeated layer and to the model.

    Layers that share parameters with other modules join the model's group. On a two-dimensional mesh, parameters are
    replicated over the first dimension and sharded over the second; if that has size 1, they are only replicated.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    layout, spec = context.layout, context.parallel
    if layout.offload and context.device.type == "cpu":
        raise UnsuitableEnvironment(
            "parallel.offload: there is no GPU memory to relieve on device cpu", fix="remove it"
        )
    # By default gradients are summed in fp32: a bf16 sum over many ranks loses small contributions.
    policy = MixedPrecisionPolicy(
        param_dtype=parameter_dtype(context.precision),
        reduce_dtype=torch.bfloat16 if spec.compress_gradients else torch.float32,
    )
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": layout.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if layout.offload else OffloadPolicy(),
    }
    fsdp_units = _independent_units(model)
    for unit in fsdp_units:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    if spec.prefetch:
        count = spec.prefetch
        for i, unit in enumerate(fsdp_units):
            unit.set_modules_to_forward_prefetch(fsdp_units[i + 1 : i + 1 + count])  # type: ignore[operator]
            unit.set_modules_to_backward_prefetch(fsdp_units[max(0, i - count) : i][::-1])  # type: ignore[operator]


def _independent_units(model: nn.Module) -> list[nn.Module]:
    """Return the layers without shared parameters: two ``fully_shard`` groups would each train a copy of one."""
    layers = [m for _, m in repeated_layers(model)]
    layer_index = {id(m): i for i, m in enumerate(layers)}
    modules = dict(model.named_modules(remove_duplicate=False))
    holders: dict[int, set[int]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        ancestors = (id(modules[".".join(name.split(".")[:n])]) for n in range(name.count(".") + 1))
        holders.setdefault(id(p), set()).add(next((layer_index[m] for m in ancestors if m in layer_index), -1))
    coupled = {i for indices in holders.values() if len(indices) > 1 for i in indices}
    return [m for i, m in enumerate(layers) if i not in coupled]


class _SumOfParameters(nn.Module):
    """Stand-in for the model in one pass, which uses each parameter in order of registration."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model  # DDP looks for the buffers in it

    def forward(self, _unused: torch.Tensor) -> torch.Tensor:
        return torch.stack([p.sum().float() for p in self.model.parameters() if p.requires_grad]).sum()


def replicate(model: nn.Module, context: RankContext) -> DistributedDataParallel:
    """Wrap ``model`` in DDP with a bucket order that a resume reproduces."""
    spec = context.parallel
    ddp_model = DistributedDataParallel(
        model,
        device_ids=[context.device.index] if context.device.type == "cuda" else None,
        bucket_cap_mb=spec.bucket_mib,
        gradient_as_bucket_view=True,
        find_unused_parameters=spec.find_unused_parameters,
        static_graph=spec.static_graph,
    )
    if spec.compress_gradients:
        ddp_model.register_comm_hook(None, _bf16_all_reduce_hook)
    # DDP rebuilds its buckets once, by the order of gradients in the first backward pass, and then sums in another
    # order. The first pass of a resumed run is at another step. This pass fixes the order before any real step:
    # docs/decisions/0003-ddp-exact-resume.md.
    ddp_model.module = _SumOfParameters(model)
    # DDP on a GPU moves the first input to its device without checking that there is one.
    ddp_model(torch.zeros((), device=context.device)).backward()
    ddp_model.module = model
    for p in model.parameters():
        p.grad = None
    return ddp_model


def _bf16_all_reduce_hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
    """Reduce gradients in bf16: half the bytes, 8 bits of precision. torch's own hook does not support gloo."""
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(compressed, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: buffer.copy_(future.value()[0]))


_UNUSED_MARKER = "parameter indices which did not receive grad"  # torch 2.13, reducer.cpp
MAX_LISTED = 8  # names in an error


def check_no_unused_parameters(model: nn.Module) -> None:
    """Raise if parameters have no gradient; call it after the last backward pass of a step.

    DDP reports them only at the next forward pass, and has not reduced the other gradients of the same bucket.

    Raises:
        ConfigError: parameters of a replicated model have no gradient, and no option allows that.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return
    unused = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise ConfigError(format_unused(unused), fix=_UNUSED_FIX)


def explain_unused(error: BaseException, model: nn.Module | None) -> None:
    """Add parameter names to DDP's error about unused parameters, which lists only indices; ignore other errors."""
    text = str(error)
    if not isinstance(model, DistributedDataParallel) or _UNUSED_MARKER not in text.lower():
        return
    indices = re.findall(r"\d+", text.lower().split(_UNUSED_MARKER, 1)[1].partition(":")[2].partition("\n")[0])
    names = [name for name, p in model.module.named_parameters() if p.requires_grad]
    unused = [names[int(n)] for n in indices if int(n) < len(names)]
    if unused:
        error.add_note(f"{format_unused(unused)}\n  fix: {_UNUSED_FIX}")


_UNUSED_FIX = (
    "set parallel.find_unused_parameters = true if this is intended; otherwise use them in forward(), or freeze them "
    "(requires_grad = False)"
)


def format_unused(names: Sequence[str]) -> str:
    """Return the message for parameters without gradients."""
    suffix = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"the loss does not depend on {', '.join(names[:MAX_LISTED])}{suffix}: no gradient for DDP to average"


def build_zero1_optimizer(
    factory: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Build a ZeRO-1 optimizer: each rank holds the state of some full parameters, updates them and broadcasts them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(groups, optimizer_class=factory)  # type: ignore[arg-type]


def gradient_sync(model: nn.Module, *, last: bool, defer: bool = True) -> AbstractContextManager[None]:
    """Return a context for one micro-batch's forward and backward pass; gradients are reduced only if it is the last.

    With ``defer`` false, a sharded model reduces them in every micro-batch, which saves the memory of a full gradient.
    """
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    set_sync = getattr(model, "set_requires_gradient_sync", None)
    if callable(set_sync):
        set_sync(last or not defer)
        model.set_is_last_backward(last)  # type: ignore[operator]
    return nullcontext()
