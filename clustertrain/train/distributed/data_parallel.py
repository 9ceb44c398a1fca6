"""Replicate or shard a model over the data-parallel ranks, and the ZeRO-1 optimizer that goes with replicas."""

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

from clustertrain.errors import ConfigError, EnvironmentNotFit
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed.precision import parameter_dtype

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward pass of their own


def units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The repeated layers by name: the members of every outermost ModuleList or ModuleDict that has no other one among
    them, as nanoGPT's ``transformer`` has beside its embeddings. They are gathered one at a time, checkpointed and
    compiled one by one."""
    for name, child in model.named_children():
        if isinstance(child, _CONTAINERS) and not any(isinstance(m, _CONTAINERS) for m in child.children()):
            yield from ((f"{name}.{n}", m) for n, m in child.named_children())
        else:
            yield from ((f"{name}.{n}", m) for n, m in units(child))


def shard(model: nn.Module, context: RankContext, mesh: DeviceMesh) -> None:
    """``fully_shard``, unit by unit; units that share parameters with what is outside of them with the rest of the
    model. On a mesh of two dimensions the first one replicates; where the second has size 1 that is all it does."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    layout, spec = context.layout, context.parallel
    if layout.offload and context.device.type == "cpu":
        raise EnvironmentNotFit("parallel.offload: there is no GPU memory to relieve on device cpu", fix="leave it out")
    # Gradients are summed in fp32: in bf16 the sum over many ranks loses what the small ones add.
    policy = MixedPrecisionPolicy(param_dtype=parameter_dtype(context.precision), reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": layout.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if layout.offload else OffloadPolicy(),
    }
    wrapped = _apart(model)
    for unit in wrapped:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    if spec.prefetch:
        ahead = spec.prefetch
        for i, unit in enumerate(wrapped):
            unit.set_modules_to_forward_prefetch(wrapped[i + 1 : i + 1 + ahead])  # type: ignore[operator]
            unit.set_modules_to_backward_prefetch(wrapped[max(0, i - ahead) : i][::-1])  # type: ignore[operator]


def _apart(model: nn.Module) -> list[nn.Module]:
    """The units whose parameters nothing else has: each of two groups of ``fully_shard`` would train a copy."""
    found = [m for _, m in units(model)]
    numbers = {id(m): i for i, m in enumerate(found)}
    modules = dict(model.named_modules(remove_duplicate=False))
    holders: dict[int, set[int]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        around = (id(modules[".".join(name.split(".")[:n])]) for n in range(name.count(".") + 1))
        holders.setdefault(id(p), set()).add(next((numbers[m] for m in around if m in numbers), -1))
    together = {i for several in holders.values() if len(several) > 1 for i in several}
    return [m for i, m in enumerate(found) if i not in together]


class _SumOfParameters(nn.Module):
    """Stands in for the model in one pass that reaches every parameter in the order of registration."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model  # DDP looks for the buffers in it

    def forward(self, _unused: torch.Tensor) -> torch.Tensor:
        return torch.stack([p.sum().float() for p in self.model.parameters() if p.requires_grad]).sum()


def replicate(model: nn.Module, context: RankContext) -> DistributedDataParallel:
    spec = context.parallel
    wrapped = DistributedDataParallel(
        model,
        device_ids=[context.device.index] if context.device.type == "cuda" else None,
        bucket_cap_mb=spec.bucket_mib,
        gradient_as_bucket_view=True,
        find_unused_parameters=spec.find_unused_parameters,
        static_graph=spec.static_graph,
    )
    if spec.compress_gradients:
        wrapped.register_comm_hook(None, _average_in_bf16)
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


def _average_in_bf16(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """Half the bytes on the wire, at the price of bf16's 8 bits of precision. torch's own hook refuses gloo."""
    whole = bucket.buffer()
    small = whole.to(torch.bfloat16).div_(dist.get_world_size())
    sent = dist.all_reduce(small, async_op=True)
    assert sent is not None
    return sent.get_future().then(lambda done: whole.copy_(done.value()[0]))


_UNUSED = "parameter indices which did not receive grad"  # torch 2.13, reducer.cpp
LISTED = 8  # names in an error


def check_all_used(model: nn.Module) -> None:
    """To be called after the last backward pass of a step. DDP notices an unused parameter only at the next forward
    pass, when it has already left other gradients of the same bucket unreduced.

    Raises:
        ConfigError: parameters of a replicated model have no gradient, and nothing allows that.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return
    unused = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise ConfigError(unused_words(unused), fix=_UNUSED_FIX)


def explain_unused(error: BaseException, model: nn.Module | None) -> None:
    """Add to DDP's own error about unused parameters, which gives indices, their names. Leaves other errors alone."""
    text = str(error)
    if not isinstance(model, DistributedDataParallel) or _UNUSED not in text.lower():
        return
    numbers = re.findall(r"\d+", text.lower().split(_UNUSED, 1)[1].partition(":")[2].partition("\n")[0])
    names = [name for name, p in model.module.named_parameters() if p.requires_grad]
    unused = [names[int(n)] for n in numbers if int(n) < len(names)]
    if unused:
        error.add_note(f"{unused_words(unused)}\n  fix: {_UNUSED_FIX}")


_UNUSED_FIX = (
    "set parallel.find_unused_parameters = true if that is intended; otherwise use them in forward(), or freeze them "
    "(requires_grad = False)"
)


def unused_words(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"the loss does not depend on {', '.join(names[:LISTED])}{more}: no gradient for DDP to average"


def split_optimizer(
    build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """ZeRO-1: each rank keeps the state of, and updates, whole parameters of its own and sends them to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(groups, optimizer_class=build)  # type: ignore[arg-type]


def synchronise(model: nn.Module, *, last: bool, defer: bool = True) -> AbstractContextManager[None]:
    """Around forward and backward of one micro-batch: gradients travel only with the last one. With ``defer`` false
    those of a sharded model do so with each, which saves the memory of a whole gradient."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    set_sync = getattr(model, "set_requires_gradient_sync", None)
    if callable(set_sync):
        set_sync(last or not defer)
        model.set_is_last_backward(last)  # type: ignore[operator]
    return nullcontext()
