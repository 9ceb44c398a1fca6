"""Frozen base weights under an adapter in bf16, 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn, is_dtensor, model_parts, to_local_shard
from clustertrain.checkpoint.format import low_bit
from clustertrain.config.low_bit import BLOCK, BasePrecision, packed_shape
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
        self.weight = nn.Parameter(self.store(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def is_packed(self) -> bool:
        return self.precision in ("int8", "nf4")

    def store(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return rows of the matrix, or a part of their columns, as they are stored."""
        if self.precision not in ("int8", "nf4"):
            return matrix.to(torch.bfloat16)
        if matrix.is_meta:
            return torch.empty(packed_shape(self.precision, *matrix.shape), dtype=torch.uint8, device="meta")
        return low_bit.quantize(matrix, self.precision)

    def dense_weight(self) -> torch.Tensor:
        """Return the matrix in fp32, split as ``weight`` is."""
        local, columns = self._local_part()
        return self._split_as_weight(expand(local, columns, torch.float32))

    def empty_matrix(self) -> torch.Tensor:
        """Return a matrix in fp32 without values, split as ``weight`` is, for :meth:`load_matrix`."""
        local, columns = self._local_part()
        return self._split_as_weight(torch.empty(local.shape[0], columns, device=local.device))

    def load_matrix(self, matrix: torch.Tensor) -> None:
        """Store the values of ``matrix``, which :meth:`empty_matrix` has returned."""
        local, _ = self._local_part()
        local.copy_(self.store(to_local_shard("", "model", matrix).local_tensor))

    def _local_part(self) -> tuple[torch.Tensor, int]:
        """Return this rank's part of ``weight`` and the number of columns in it."""
        local = to_local_shard("", "model", self.weight).local_tensor
        return local, min(self.in_features, local.shape[1] * BLOCK) if self.is_packed else local.shape[1]

    def _split_as_weight(self, local: torch.Tensor) -> torch.Tensor:
        if not is_dtensor(self.weight):
            return local
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.weight.device_mesh, self.weight.placements, run_check=False,
            shape=torch.Size(self.matrix_shape), stride=(self.in_features, 1),
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.precision}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        out = _matmul_on_mesh(x, self.weight) if is_dtensor(self.weight) else _multiply(x, self.weight)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out


def _multiply(x: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _FrozenMatmul.apply(x, stored)  # type: ignore[no-untyped-call]
    return out


def _matmul_on_mesh(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply this rank's parts: unpacking bytes has no rule for sharded tensors."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    assert isinstance(x, DTensor) and isinstance(weight, DTensor)  # the style of the layer's plan has placed both
    (placement,) = weight.placements
    by_outputs, by_inputs = placement.is_shard(0), placement.is_shard(1)
    local_x = x.to_local(grad_placements=[Partial()] if by_outputs else x.placements)
    out = _multiply(local_x, weight.to_local())
    result = Shard(-1 + out.dim()) if by_outputs else Partial() if by_inputs else Replicate()
    return DTensor.from_local(out, weight.device_mesh, [result], run_check=False)


class FrozenEmbedding(nn.Embedding):
    """An embedding that is never trained, in bf16. Its output has the type of the residual stream."""

    def __init__(self, embedding: nn.Embedding) -> None:
        weight = embedding.weight.detach().to(torch.bfloat16)
        rows, columns = weight.shape
        super().__init__(rows, columns, padding_idx=embedding.padding_idx, _weight=weight, _freeze=True)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim

    def store(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.to(torch.bfloat16)


def convert_base(model: nn.Module, precision: BasePrecision) -> None:
    """Store the frozen matrices of ``model``, the whole model, as ``precision`` in place.

    The linear layers of the repeated layers get ``precision``; a frozen embedding and head, where few bits cost the
    most accuracy, get bf16. Norms, biases, matrices that several modules share and all that is trained stay as they
    are. A model on the meta device gets its values later, from its initialization, files or a checkpoint.

    Raises:
        ConfigError: no linear layer of the repeated layers is frozen.
    """
    if precision == "unchanged":
        return
    shared = {id(location.parameter) for tied in tied_weights.find_tied(model) for location in tied}
    in_layers = {id(m) for _, layer in data_parallel.repeated_layers(model) for m in layer.modules()}
    found = False
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear | nn.Embedding) or type(child) not in (nn.Linear, nn.Embedding):
                continue  # a subclass may compute something else
            if child.weight.requires_grad or id(child.weight) in shared:
                continue
            if isinstance(child, nn.Embedding):
                setattr(parent, name, FrozenEmbedding(child))
            else:
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
    if any(isinstance(m, FrozenLinear) and m.precision == "nf4" for m in model_part.modules()):
        low_bit.nf4_pairs(context.device)  # before compilation, which would trace their creation
    for module in model_part.modules():
        if isinstance(module, FrozenEmbedding):
            module.register_forward_hook(lambda _, inputs, output: output.to(dtype))


def frozen_matrices(model: nn.Module) -> dict[str, FrozenLinear | FrozenEmbedding]:
    """Return this rank's modules that :func:`convert_base` has converted, by the names of their weights."""
    return {
        f"{clean_fqn(name)}.weight" if name else "weight": module
        for part in model_parts(model)
        for name, module in part.named_modules()
        if isinstance(module, FrozenLinear | FrozenEmbedding)
    }


def packed_layers(model: nn.Module) -> dict[str, FrozenLinear]:
    """Return this rank's layers in 8 or 4 bits by the names of their weights."""
    return {n: m for n, m in frozen_matrices(model).items() if isinstance(m, FrozenLinear) and m.is_packed}


def packed_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the shapes of the matrices in 8 or 4 bits by the names of their weights."""
    return {name: layer.matrix_shape for name, layer in packed_layers(model).items()}


def check_split_by_inputs(name: str, module: nn.Module, tp: int) -> None:
    """Raise ConfigError if a split of the inputs of a layer would cut a block of weights that share a scale."""
    if isinstance(module, FrozenLinear) and module.is_packed and module.in_features % (BLOCK * tp):
        raise ConfigError(
            f"{name}: adapter.base_precision = {module.precision!r} with tp {tp} would split a block of {BLOCK} "
            f"weights that share a scale: {module.in_features} inputs / {tp} = {module.in_features / tp:g}",
            fix="use adapter.base_precision = 'bf16', or fsdp instead of tp",
        )
