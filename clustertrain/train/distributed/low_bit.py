"""Frozen base weights under an adapter in bf16, 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn, is_dtensor
from clustertrain.checkpoint.format import low_bit
from clustertrain.config.low_bit import BasePrecision, packed_shape
from clustertrain.errors import ConfigError
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed import data_parallel, tied_weights
from clustertrain.train.distributed.precision import parameter_dtype


class _FrozenMatmul(torch.autograd.Function):
    """``x @ weight.T`` that keeps neither its input nor the weight in the compute type for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(stored)
        ctx.columns = x.shape[-1]
        return F.linear(x, expand(stored, ctx.columns, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (stored,) = ctx.saved_tensors
        return grad @ expand(stored, ctx.columns, grad.dtype), None


def expand(stored: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix (rows, columns) of a stored weight, which is packed or in bf16, as ``dtype``."""
    return low_bit.dequantize(stored, columns, dtype) if low_bit.is_packed(stored) else stored.to(dtype)


class FrozenLinear(nn.Linear):
    """A linear layer that is never trained. ``weight`` is in bf16, or the packed bytes of 8 or 4 bits.

    Layouts split it as any other linear layer: by outputs along the first dimension, by inputs along the second one.
    """

    def __init__(self, linear: nn.Linear, precision: BasePrecision) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.precision = linear.in_features, linear.out_features, precision
        weight = linear.weight.detach()
        if precision in ("int8", "nf4") and weight.is_meta:
            shape = packed_shape(precision, *weight.shape)  # type: ignore[arg-type]
            stored = torch.empty(shape, dtype=torch.uint8, device="meta")
        else:
            stored = self.store(weight)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.bias = linear.bias  # type: ignore[assignment]

    def store(self, weight: torch.Tensor) -> torch.Tensor:
        """Return rows of the matrix as they are stored."""
        if self.precision in ("int8", "nf4"):
            return low_bit.quantize(weight, self.precision)
        return weight.to(torch.bfloat16)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.precision}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        out = _matmul_on_mesh(x, self.weight) if is_dtensor(self.weight) else _FrozenMatmul.apply(x, self.weight)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out  # type: ignore[no-any-return]


def _matmul_on_mesh(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply this rank's parts: unpacking bytes has no rule for sharded tensors."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    assert isinstance(x, DTensor) and isinstance(weight, DTensor)  # the style of the layer's plan has placed both
    (placement,) = weight.placements
    by_outputs, by_inputs = placement.is_shard(0), placement.is_shard(1)
    local_x = x.to_local(grad_placements=[Partial()] if by_outputs else x.placements)
    out = _FrozenMatmul.apply(local_x, weight.to_local())
    result = Shard(-1 + out.dim()) if by_outputs else Partial() if by_inputs else Replicate()
    return DTensor.from_local(out, weight.device_mesh, [result], run_check=False)


class FrozenEmbedding(nn.Embedding):
    """An embedding that is never trained, in bf16. Its output has the type of the residual stream."""

    def __init__(self, embedding: nn.Embedding) -> None:
        weight = embedding.weight.detach().to(torch.bfloat16)
        super().__init__(*weight.shape, padding_idx=embedding.padding_idx, _weight=weight, _freeze=True)


def convert_base(model: nn.Module, precision: BasePrecision) -> None:
    """Store the frozen matrices of ``model``, the whole model, as ``precision`` in place; "" leaves them as they are.

    The linear layers of the repeated layers get ``precision``; a frozen embedding and head, where few bits cost the
    most accuracy, get bf16. Norms, biases, matrices that several modules share and all that is trained stay as they
    are. A model on the meta device gets its values later, from its initialization, files or a checkpoint.

    Raises:
        ConfigError: no linear layer of the repeated layers is frozen.
    """
    if not precision:
        return
    shared = {id(location.parameter) for tied in tied_weights.find_tied(model) for location in tied}
    in_layers = {id(m) for _, layer in data_parallel.repeated_layers(model) for m in layer.modules()}
    found = False
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in (nn.Linear, nn.Embedding) or child.weight.requires_grad or id(child.weight) in shared:
                continue
            if isinstance(child, nn.Embedding):
                setattr(parent, name, FrozenEmbedding(child))
                continue
            found |= id(child) in in_layers
            setattr(parent, name, FrozenLinear(child, precision if id(child) in in_layers else "bf16"))
    if not found:
        raise ConfigError(
            f"adapter.base_precision = {precision!r}: the layers of {type(model).__name__} have no frozen nn.Linear",
            fix="remove it, or check adapter.target_modules",
        )


def configure(model_part: nn.Module, context: RankContext) -> None:
    """Cast the outputs of frozen embeddings to the type that the residual stream has without them."""
    cast = parameter_dtype(context.precision) if context.layout.is_fully_sharded else None
    dtype = cast or torch.float32
    for module in model_part.modules():
        if isinstance(module, FrozenEmbedding):
            module.register_forward_hook(lambda _, inputs, output: output.to(dtype))


def frozen_matrices(model: nn.Module) -> dict[str, FrozenLinear | FrozenEmbedding]:
    """Return the modules of ``model`` whose weight :func:`convert_base` has converted, by the weight's name."""
    return {
        f"{clean_fqn(name)}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, FrozenLinear | FrozenEmbedding)
    }
