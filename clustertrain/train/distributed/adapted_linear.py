"""Linear layers with a low-rank adapter beside a frozen weight: LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353).

An adapted layer remains the module that it was, with the same parameters and names: only its class is replaced, by a
subclass with a different forward pass. Names in checkpoints, plans of tensor parallelism and patterns therefore do not
change. The parameters of the adapter are:

- ``lora_A`` (rank, in_features), drawn as PEFT draws it,
- ``lora_B`` (out_features, rank), zero at the start,
- with DoRA also ``lora_magnitude_vector`` (out_features,), the norms of the rows of the weight at the start.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn, is_dtensor, model_parts, to_local_shard
from clustertrain.train.distributed import data_parallel
from clustertrain.train.distributed.dropout import Dropout
from clustertrain.train.distributed.low_bit import FrozenLinear

PARAMETER_NAMES = ("lora_A", "lora_B", "lora_magnitude_vector")


@dataclass(frozen=True)
class LowRank:
    """Settings of an adapter."""

    rank: int
    scaling: float
    """Factor of B A."""
    dropout: float = 0.0
    """Dropout probability on the adapter's input."""
    has_magnitude: bool = False
    """DoRA: the norm of each row of the weight is trained separately."""


class SampleScope:
    """The positions of the samples that a repeated layer is computing, for the dropout masks inside it."""

    samples: torch.Tensor | None = None


class AdaptedLayer(nn.Module):
    """First base class of an adapted layer; the class that the layer had before is the second.

    That class may be any with ``in_features``, ``out_features``, ``bias`` and a forward pass of a Linear layer. DoRA
    also reads ``weight``, the values (out_features, in_features) in any floating-point dtype.
    """

    low_rank: LowRank
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude_vector: nn.Parameter
    lora_dropout: Dropout
    sample_scope: SampleScope
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        dropped = self.lora_dropout(x, self.sample_scope.samples)
        delta = self._multiply_low_rank(dropped)
        if not self.low_rank.has_magnitude:
            return out + delta
        bias = 0.0 if self.bias is None else self.bias
        # As in PEFT, dropout also applies to the weight's part of the change.
        product = out - bias if dropped is x else F.linear(dropped, self._base_weight().to(dropped.dtype))
        ratio = self._magnitude_ratio()
        # As in PEFT, the sum has the type of the base's output: the ratio is fp32, also under autocast.
        return (out + (ratio - 1) * product + ratio * delta).to(out.dtype)

    def _multiply_low_rank(self, x: torch.Tensor) -> torch.Tensor:
        """Return scaling * B (A x)."""
        inner = F.linear(x, self.lora_A)
        is_sum = is_dtensor(inner) and any(p.is_partial() for p in inner.placements)
        product = _multiply_partial(inner, self.lora_B) if is_sum else F.linear(inner, self.lora_B)
        return product * self.low_rank.scaling

    def _base_weight(self) -> torch.Tensor:
        """Return the values of the frozen matrix (out_features, in_features)."""
        weight: torch.Tensor = self.dense_weight() if isinstance(self, FrozenLinear) else self.weight
        return weight

    def _magnitude_ratio(self) -> torch.Tensor:
        """Return the trained norm of each row over its actual one, which counts as constant (section 4.3)."""
        with torch.no_grad(), torch.autocast(self.lora_A.device.type, enabled=False):
            changed = self._base_weight().float() + self.low_rank.scaling * (self.lora_B.float() @ self.lora_A.float())
            norms = torch.linalg.vector_norm(changed, dim=1)
        # A row of zeros has a magnitude of 0, and stays one.
        ratio: torch.Tensor = self.lora_magnitude_vector / norms.clamp_min(torch.finfo(norms.dtype).tiny)
        return ratio


def _multiply_partial(inner: Any, lora_b: Any) -> torch.Tensor:
    """Return B h for an h that is a sum over the tensor-parallel ranks, as a sum over these ranks.

    Without this, DTensor would add up the ranks' parts here, and again those of the layer's own output.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    local_inner = inner.to_local(grad_placements=[Replicate()])
    local_b = lora_b.to_local(grad_placements=[Partial()])
    product: torch.Tensor = DTensor.from_local(
        F.linear(local_inner, local_b), inner.device_mesh, inner.placements, run_check=False
    )
    return product


_ADAPTED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _adapted_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of an adapted layer of class ``cls``; always the same one, so that torch compiles it once."""
    if cls not in _ADAPTED_CLASSES:
        _ADAPTED_CLASSES[cls] = type(f"Adapted{cls.__name__}", (AdaptedLayer, cls), {})
    return _ADAPTED_CLASSES[cls]


def adapt_linear(module: nn.Module, low_rank: LowRank) -> None:
    """Give ``module``, a Linear layer or one of the kind that :class:`AdaptedLayer` describes, an adapter in place.

    The parameters of the adapter are on the device of the module's first tensor, in fp32 and without values; those of
    the module are frozen.
    """
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device
    for p in module.parameters():
        p.requires_grad_(False)
    out_features, in_features = int(module.out_features), int(module.in_features)  # type: ignore[arg-type]
    module.__class__ = _adapted_class(type(module))
    module.low_rank = low_rank  # type: ignore[assignment]
    module.lora_A = nn.Parameter(torch.empty(low_rank.rank, in_features, device=device))
    module.lora_B = nn.Parameter(torch.empty(out_features, low_rank.rank, device=device))
    if low_rank.has_magnitude:
        module.lora_magnitude_vector = nn.Parameter(torch.empty(out_features, device=device))
    module.lora_dropout = Dropout(low_rank.dropout)
    module.sample_scope = SampleScope()  # type: ignore[assignment]


def iter_adapted(model: nn.Module) -> Iterator[tuple[str, AdaptedLayer]]:
    """Yield this rank's adapted layers by their names in the whole model."""
    for part in model_parts(model):
        for name, module in part.named_modules():
            if isinstance(module, AdaptedLayer):
                yield clean_fqn(name), module


def pass_samples(model_part: nn.Module) -> None:
    """Have the repeated layers pass their argument ``samples`` to the dropout of the adapters inside.

    An adapted layer has only one argument. Without the samples' positions its masks would depend on the layout. Call it
    before activation checkpointing, so that a recomputation passes them again.
    """
    for _, unit in data_parallel.repeated_layers(model_part):
        layers = [m for _, m in iter_adapted(unit) if m.low_rank.dropout]
        parameters = list(inspect.signature(unit.forward).parameters)
        if layers and "samples" in parameters:
            scope = SampleScope()
            for layer in layers:
                layer.sample_scope = scope
            unit.forward = _record_samples(unit.forward, scope, parameters.index("samples"))


def _record_samples(forward: Callable[..., Any], scope: SampleScope, position: int) -> Callable[..., Any]:
    def forward_with_samples(*args: Any, **kwargs: Any) -> Any:
        scope.samples = args[position] if len(args) > position else kwargs.get("samples")
        return forward(*args, **kwargs)

    return forward_with_samples


def adapter_parameter_names(model: nn.Module) -> set[str]:
    """Return the names, in the whole model, of the parameters of this rank's adapters."""
    return {
        f"{name}.{own}" if name else own
        for name, module in iter_adapted(model)
        for own in PARAMETER_NAMES
        if own in module._parameters
    }


def init_parameter(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Initialize the full parameter ``name`` of an adapter, as PEFT does. :func:`fill_magnitudes` fills magnitudes."""
    if name.endswith("lora_A"):
        bound = 1 / math.sqrt(tensor.shape[1])
        tensor.uniform_(-bound, bound, generator=generator)
    else:
        tensor.zero_()


@torch.no_grad()
def fill_magnitudes(model: nn.Module) -> None:
    """Set the magnitudes of DoRA to the norms of the rows of the weights, wherever they are. Collective.

    The adapters then change nothing while B is zero.
    """
    for _, module in iter_adapted(model):
        if not module.low_rank.has_magnitude:
            continue
        weight = module._base_weight()
        squares = to_local_shard("", "model", weight).local_tensor.float().square().sum(1)
        if is_dtensor(weight):
            for dim, placement in enumerate(weight.placements):
                if placement.is_shard(1):
                    dist.all_reduce(squares, group=weight.device_mesh.get_group(dim))
        to_local_shard("", "model", module.lora_magnitude_vector).local_tensor.copy_(squares.sqrt())
