"""Application of the plan's layout to a model.

The order is stages, tensor parallelism, activation checkpointing, compilation, data parallelism; each wraps the result
of the previous ones.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn, to_local_shard
from clustertrain.errors import ConfigError
from clustertrain.train.core import seeds
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import (
    adapted_linear,
    attention_kernels,
    block_transforms,
    data_parallel,
    dropout,
    low_bit,
    tied_weights,
)
from clustertrain.train.distributed.mesh import ProcessGroups


def parallelize(
    model: nn.Module, context: RankContext, groups: ProcessGroups, seed: int, *, will_load: Collection[str] = ()
) -> nn.Module:
    """Return ``model`` on the device in the plan's layout.

    Parameters on the meta device are filled by the model's ``init_parameter(name, tensor, generator)``, each in full
    from (seed, name), so that values do not depend on the layout. For any other model, rank 0's values are broadcast.

    Args:
        will_load: names of tensors that the caller loads afterwards; on the meta device they are not filled.

    Raises:
        ConfigError: the model is on the meta device without ``init_parameter`` or with other buffers there, or does
            not support the layout.
    """
    layout = context.layout
    on_meta = any(p.is_meta for p in model.parameters())
    if on_meta:
        _check_meta(model, will_load)
    elif groups.mesh is not None and (layout.is_fully_sharded or layout.is_model_parallel):
        # Sharding and stages move one layer at a time, so that the whole model need not fit on a GPU.
        _broadcast_from_rank0(model if layout.tp == 1 else model.to(context.device), context.device)
    full_model = model
    pipeline_mesh, tensor_mesh, data_mesh = groups.pp_mesh(), groups.tp_mesh(), groups.dp_mesh()
    # Check the whole model: a stage has only some of its modules.
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
        attention_kernels.configure(model_part, context)
        dropout.configure(model_part, context, seed)
        low_bit.configure(model_part, context)
        adapted_linear.pass_samples(model_part)
        block_transforms.apply(model_part, context)
        if layout.is_fully_sharded and data_mesh is not None:
            data_parallel.shard(model_part, context, data_mesh)
        _move_to_device(
            model_part, context.device, layout.offload and layout.is_fully_sharded and data_mesh is not None
        )
        if on_meta:
            _init_parameters(model_part, full_model, seed, context.device, will_load)
    if pipeline_mesh is not None:
        return pipeline.Pipeline(model_parts, full_model, context, pipeline_mesh)
    if groups.mesh is not None and layout.strategy in ("ddp", "zero1") and not layout.is_model_parallel:
        return data_parallel.replicate(model, context)
    return model


def _check_meta(model: nn.Module, will_load: Collection[str]) -> None:
    filled = adapted_linear.adapter_parameter_names(model).union(will_load)
    is_filled = all(clean_fqn(name) in filled for name, _ in model.named_parameters())
    if not is_filled and not callable(getattr(model, "init_parameter", None)):
        raise ConfigError(
            f"{type(model).__name__} is on the meta device and has no init_parameter(name, tensor, generator)",
            fix="add the method, or build the model on the CPU",
        )
    for name, buffer in model.named_buffers():
        if buffer.is_meta and clean_fqn(name) not in will_load:
            raise ConfigError(
                f"buffer {name} is on the meta device, and nothing would fill it", fix="build it on the CPU"
            )


def _broadcast_from_rank0(model: nn.Module, device: torch.device) -> None:
    """Give all ranks rank 0's values; each tensor passes through ``device`` and stays where it is."""
    for tensor in (*model.parameters(), *model.buffers()):
        on_device = tensor.detach().to(device)
        dist.broadcast(on_device, src=0)
        if tensor.device != device:
            tensor.detach().copy_(on_device)


def _move_to_device(model_part: nn.Module, device: torch.device, offload: bool) -> None:
    """Move all tensors to ``device``; with ``offload`` parameters stay in host memory, where ``fully_shard`` expects
    them.

    Tensors on the meta device become uninitialized. ``to_empty`` would also discard the values of buffers.
    """
    param_device = torch.device("cpu") if offload else device

    def move(t: torch.Tensor) -> torch.Tensor:
        target = param_device if isinstance(t, nn.Parameter) else device
        return torch.empty_like(t, device=target) if t.is_meta else t.to(target)

    with tied_weights.preserve_ties(model_part):  # a tied meta parameter is materialized once per module
        model_part._apply(move)  # type: ignore[no-untyped-call]


def _init_parameters(
    model_part: nn.Module, full_model: nn.Module, seed: int, device: torch.device, will_load: Collection[str]
) -> None:
    """Initialize the parameters, drawing on ``device`` wherever they are stored: another device draws other values."""
    adapters = adapted_linear.adapter_parameter_names(model_part)
    matrices = low_bit.frozen_matrices(model_part)
    with torch.no_grad():
        for name, p in model_part.named_parameters():
            name = clean_fqn(name)  # noqa: PLW2901 - values must not depend on wrappers
            if name in will_load:
                continue
            init: Any = adapted_linear.init_parameter if name in adapters else full_model.init_parameter
            frozen = matrices.get(name)
            shape, dtype = (frozen.matrix_shape, torch.float32) if frozen is not None else (p.shape, p.dtype)
            full = torch.empty(shape, dtype=dtype, device=device)
            generator = torch.Generator(device).manual_seed(seeds.derive_seed(seed, "init", name))
            init(name, full, generator)
            if frozen is not None:
                full = frozen.store(full)
            local_block = to_local_shard(name, "model", p)
            local_block.local_tensor.copy_(
                full[
                    tuple(
                        slice(s, s + n) for s, n in zip(local_block.start, local_block.local_tensor.shape, strict=True)
                    )
                ]
            )
