"""Transforms of the repeated layers: fp8, activation offload and checkpointing, compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from clustertrain.plan.layout import recompute_interval
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed.compile import inductor
from clustertrain.train.distributed.data_parallel import repeated_layers
from clustertrain.train.distributed.document_masks import DocumentAttention

aten = torch.ops.aten
# Expensive to recompute: matmuls, convolutions and attention. Everything else is recomputed in the backward pass (the
# idea of Korthikanti et al., arXiv 2205.05198, section 5, with the choice per operator).
_SAVED_OPS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.convolution.default,
        aten._scaled_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)

MIN_OFFLOAD_NUMEL = 1024  # elements; a smaller transfer costs more time than it saves memory


def apply(model: nn.Module, context: RankContext) -> None:
    """Convert, checkpoint and compile the repeated layers of ``model`` in place, without renaming anything."""
    if context.precision == "fp8":
        from clustertrain.train.distributed import fp8

        fp8.apply(model, context.device)
    if context.parallel.channels_last:
        model.register_forward_pre_hook(_to_channels_last)
    ac_mode = context.layout.activation_checkpointing
    if context.parallel.compile:
        # Side effects of a layer's forward pass (cached rotary tables) need not be repeated in the recomputation.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    interval = recompute_interval(ac_mode) or 1
    for i, (_, unit) in enumerate(repeated_layers(model)):
        is_recomputed = ac_mode != "none" and i % interval == 0
        if context.parallel.activation_offload:
            unit.forward = _offload_activations(unit)
        if is_recomputed:
            options: dict[str, Any] = {"use_reentrant": False}
            if ac_mode == "selective":
                options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _selective_policy)
            # Set on the instance, because a wrapper module would rename its parameters.
            unit.forward = _checkpoint_forward(unit.forward, options)
        if context.parallel.compile:
            unit.compile(fullgraph=not is_recomputed, backend=inductor)


def _to_channels_last(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert 4-D floating-point inputs to channels-last.

    Weights stay as they are, since ``fully_shard`` accepts only contiguous ones; convolutions accept either.
    """
    converted: tuple[Any, ...] = tree_map_only(
        torch.Tensor,
        lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 and t.is_floating_point() else t,
        inputs,
    )
    return converted


def _offload_activations(unit: nn.Module) -> Callable[..., Any]:
    """Return a forward pass of ``unit`` that keeps activations in host memory until the backward pass.

    Parameters stay on the device; torch's ``save_on_cpu`` would copy them as well. So do the mask and the tables that
    all layers share.
    """
    forward = unit.forward

    def forward_with_offload(*args: Any, **kwargs: Any) -> Any:
        # Read on each call: fully_shard has just installed the gathered parameters.
        shared = [t for a in (*args, *kwargs.values()) if isinstance(a, DocumentAttention) for t in a.tensors]
        kept_ptrs = {t.untyped_storage().data_ptr() for t in (*unit.parameters(), *shared)}

        def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
            if tensor.untyped_storage().data_ptr() in kept_ptrs or tensor.numel() < MIN_OFFLOAD_NUMEL:
                return tensor.device, tensor
            pinned = tensor.device.type == "cuda"
            host_tensor = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned)
            return tensor.device, host_tensor.copy_(tensor, non_blocking=pinned)

        def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
            device, host_tensor = packed
            return host_tensor.to(device, non_blocking=host_tensor.is_pinned())

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return forward_with_offload


def _checkpoint_forward(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Wrap ``forward`` in a function; with a ``partial`` of ``checkpoint`` dynamo sees only torch's frames and compiles
    none."""

    def forward_with_recompute(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return forward_with_recompute


def _selective_policy(_: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE
