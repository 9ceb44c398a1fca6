"""Give a model the plan's layout: stages, tensor parallel, activation checkpointing, compile, data parallel, in that
order, since each wraps what the ones before it made."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.checkpoint.core.state_dict import block, clean
from clustertrain.errors import ConfigError
from clustertrain.train.core import seeds
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import block_transforms, data_parallel, dropout, tied_weights
from clustertrain.train.distributed.mesh import Groups


class Initialises(Protocol):
    """A model that may be built on the meta device."""

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill ``tensor``, the whole parameter ``name``, using ``generator`` alone."""


def parallelize(model: nn.Module, context: RankContext, groups: Groups, seed: int) -> nn.Module:
    """``model`` on the device in the plan's layout.

    On the meta device its parameters are filled by its ``init_parameter``, each whole from (seed, name), so that the
    values do not depend on the layout. Otherwise rank 0's values are taken by all.

    Raises:
        ConfigError: on the meta device without ``init_parameter``, or with buffers; or the model cannot be split as
            the layout wants.
    """
    layout = context.layout
    on_meta = any(p.is_meta for p in model.parameters())
    if on_meta:
        _check_meta(model)
    elif groups.mesh is not None and (layout.fully_sharded or layout.model_parallel):
        _take_rank_0(model.to(context.device))
    whole = model
    pipeline_mesh, tensor_mesh, data_mesh = groups.pipeline(), groups.tensor(), groups.data()
    # Of the whole model, before a stage has only some of its modules.
    if tensor_mesh is not None:
        from clustertrain.train.distributed import tensor_parallel

        tensor_parallel.check(model, context)
    if groups.context is not None:
        from clustertrain.train.distributed import context_parallel

        context_parallel.check(model, context)
    parts = [model]
    if pipeline_mesh is not None:
        from clustertrain.train.distributed import pipeline

        parts = pipeline.split(model, context, pipeline_mesh)
    for part in parts:
        if tensor_mesh is not None:
            tensor_parallel.apply(part, context, tensor_mesh)
        if groups.context is not None:
            context_parallel.apply(part, context, groups.context)
        dropout.place(part, context, seed)
        block_transforms.apply(part, context)
        if layout.fully_sharded and data_mesh is not None:
            data_parallel.shard(part, context, data_mesh)
        _place(part, context.device, layout.offload and layout.fully_sharded and data_mesh is not None)
        if on_meta:
            _initialise(part, whole, seed, context.device)
    if pipeline_mesh is not None:
        return pipeline.Pipeline(parts, whole, context, pipeline_mesh)
    if groups.mesh is not None and layout.strategy in ("ddp", "zero1") and not layout.model_parallel:
        return data_parallel.replicate(model, context)
    return model


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


def _place(part: nn.Module, device: torch.device, offload: bool) -> None:
    """All on ``device``, but with ``offload`` the parameters in host memory, where ``fully_shard`` looks for them. What
    is on the meta device becomes empty; not so ``to_empty``, which would empty buffers that have values too."""
    home = torch.device("cpu") if offload else device

    def placed(t: torch.Tensor) -> torch.Tensor:
        there = home if isinstance(t, nn.Parameter) else device
        return torch.empty_like(t, device=there) if t.is_meta else t.to(there)

    with tied_weights.kept(part):  # what leaves the meta device becomes another parameter in each module
        part._apply(placed)  # type: ignore[no-untyped-call]


def _initialise(part: nn.Module, whole: nn.Module, seed: int, device: torch.device) -> None:
    """The values are drawn on ``device`` wherever they are kept: another one draws others."""
    with torch.no_grad():
        for name, p in part.named_parameters():
            name = clean(name)  # noqa: PLW2901 - wrappers must not change the values
            full = torch.empty(p.shape, dtype=p.dtype, device=device)
            generator = torch.Generator(device).manual_seed(seeds.derive(seed, "init", name))
            whole.init_parameter(name, full, generator)  # type: ignore[operator]
            mine = block(name, "model", p)
            mine.local.copy_(full[tuple(slice(s, s + n) for s, n in zip(mine.start, mine.local.shape, strict=True))])
