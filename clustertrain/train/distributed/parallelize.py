"""Give a model the plan's layout: stages, tensor parallel, activation checkpointing, compile, data parallel, in that
order, since each wraps what the ones before it made."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn, to_local_shard
from clustertrain.errors import ConfigError
from clustertrain.train.core import seeds
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import block_transforms, data_parallel, dropout, tied_weights
from clustertrain.train.distributed.mesh import ProcessGroups


class SupportsInitParameter(Protocol):
    """A model that may be built on the meta device."""

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill ``tensor``, the whole parameter ``name``, using ``generator`` alone."""


def parallelize(model: nn.Module, context: RankContext, groups: ProcessGroups, seed: int) -> nn.Module:
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
    elif groups.mesh is not None and (layout.is_fully_sharded or layout.is_model_parallel):
        _broadcast_from_rank0(model.to(context.device))
    full_model = model
    pipeline_mesh, tensor_mesh, data_mesh = groups.pp_mesh(), groups.tp_mesh(), groups.dp_mesh()
    # Of the whole model, before a stage has only some of its modules.
    if tensor_mesh is not None:
        from clustertrain.train.distributed import tensor_parallel

        tensor_parallel.check(model, context)
    if groups.cp_mesh is not None:
        from clustertrain.train.distributed import context_parallel

        context_parallel.check(model, context)
    model_parts = [model]
    if pipeline_mesh is not None:
        from clustertrain.train.distributed import pipeline

        model_parts = pipeline.split(model, context, pipeline_mesh)
    for model_part in model_parts:
        if tensor_mesh is not None:
            tensor_parallel.apply(model_part, context, tensor_mesh)
        if groups.cp_mesh is not None:
            context_parallel.apply(model_part, context, groups.cp_mesh)
        dropout.configure(model_part, context, seed)
        block_transforms.apply(model_part, context)
        if layout.is_fully_sharded and data_mesh is not None:
            data_parallel.shard(model_part, context, data_mesh)
        _move_to_device(
            model_part, context.device, layout.offload and layout.is_fully_sharded and data_mesh is not None
        )
        if on_meta:
            _init_parameters(model_part, full_model, seed, context.device)
    if pipeline_mesh is not None:
        return pipeline.Pipeline(model_parts, full_model, context, pipeline_mesh)
    if groups.mesh is not None and layout.strategy in ("ddp", "zero1") and not layout.is_model_parallel:
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


def _broadcast_from_rank0(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def _move_to_device(model_part: nn.Module, device: torch.device, offload: bool) -> None:
    """All on ``device``, but with ``offload`` the parameters in host memory, where ``fully_shard`` looks for them. What
    is on the meta device becomes empty; not so ``to_empty``, which would empty buffers that have values too."""
    param_device = torch.device("cpu") if offload else device

    def move(t: torch.Tensor) -> torch.Tensor:
        target = param_device if isinstance(t, nn.Parameter) else device
        return torch.empty_like(t, device=target) if t.is_meta else t.to(target)

    with tied_weights.preserve_ties(model_part):  # what leaves the meta device becomes another parameter in each module
        model_part._apply(move)  # type: ignore[no-untyped-call]


def _init_parameters(model_part: nn.Module, full_model: nn.Module, seed: int, device: torch.device) -> None:
    """The values are drawn on ``device`` wherever they are kept: another one draws others."""
    with torch.no_grad():
        for name, p in model_part.named_parameters():
            name = clean_fqn(name)  # noqa: PLW2901 - wrappers must not change the values
            full = torch.empty(p.shape, dtype=p.dtype, device=device)
            generator = torch.Generator(device).manual_seed(seeds.derive_seed(seed, "init", name))
            full_model.init_parameter(name, full, generator)  # type: ignore[operator]
            local_block = to_local_shard(name, "model", p)
            local_block.local_tensor.copy_(
                full[
                    tuple(
                        slice(s, s + n) for s, n in zip(local_block.start, local_block.local_tensor.shape, strict=True)
                    )
                ]
            )
