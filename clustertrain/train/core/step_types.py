"""Types and helper functions for training steps that several packages share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.train.core.async_copy import AsyncCopy

# Mean over the samples, or (sum, count).
LossValue: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor | int]"
Loss = Callable[[Any, Any], LossValue]  # of (output, target)
DOCUMENT_STARTS = "document_starts"  # argument of a model that attends inside the documents of packed samples


@dataclass(frozen=True)
class StepResult:
    """Result of a training step. Tensors are 0-dimensional, on the device, and equal on all ranks.

    If all targets of a step are masked, the loss is NaN and the gradient is zero.
    """

    loss: torch.Tensor
    """Mean over the global batch."""
    grad_norm: torch.Tensor
    """Global norm of the gradient before clipping."""
    skipped: torch.Tensor
    """The weights did not change: loss or gradient is NaN or Inf, or the loss is a spike that the recipe skips."""
    clipped: torch.Tensor
    """Clipping changed the gradient."""
    clip_fraction: torch.Tensor
    """Share of clipped steps among the last 100."""
    finite: torch.Tensor
    """Loss and gradient are finite."""
    spike: torch.Tensor
    """The loss is far above the recent ones."""
    bad: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """:func:`compute_nonfinite_moments` over the micro-batches of all data-parallel ranks."""
    overflow: bool = False
    """The scaled gradient left the range of fp16. The loss scale handles that: the step is skipped, but not bad."""
    layers: AsyncCopy | None = None
    """Statistics per layer, if requested for this step."""
    noise_scale: torch.Tensor | None = None
    """Gradient noise scale in samples, if it was measured in this step."""


def as_sum_and_count(value: LossValue, target: Any, is_padding: bool) -> tuple[torch.Tensor, torch.Tensor | int]:
    """Return a loss function's result as (sum, count); zeros for a micro-batch that is only padding."""
    if isinstance(value, tuple):
        total, count = value
    else:
        count = len(target[0] if isinstance(target, (tuple, list)) else target)
        total = value * count
    if is_dtensor(total):
        total = total.full_tensor()  # a loss of sharded logits, the same on the ranks that share them
    return (total * 0, 0) if is_padding else (total, count)


def pack_sum_count(total: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """Return a micro-batch's (sum of losses, count) in fp64, on the device; no host sync."""
    if not isinstance(count, torch.Tensor):
        count = torch.full((), count, device=total.device)  # filled on the device: a copy would make the host wait
    return torch.stack([total.double(), count.to(total.device).double()])


def index_powers(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the powers 0, 1 and 2 of ``count`` indices starting at ``first``: (count, 3) in fp64."""
    indices = torch.arange(first, first + count, dtype=torch.float64, device=device)
    return torch.stack([torch.ones_like(indices), indices, indices.square()], 1)


def compute_nonfinite_moments(totals: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """Return the sum of :func:`index_powers` over the micro-batches whose loss is NaN or Inf: (3,) in fp64.

    After a sum over the ranks, :func:`sole_bad_micro_batch` identifies such a micro-batch if there is only one.

    Args:
        totals: (sum of losses, count) of each micro-batch, (micro-batches, 2).
        powers: :func:`index_powers` of the micro-batches, (micro-batches, 3).
    """
    return ((~totals[:, :1].isfinite()).double() * powers).sum(0)


def sole_bad_micro_batch(num_bad: float, index_sum: float, square_sum: float) -> int:
    """Return the index of the only bad micro-batch, or -1 if there is none or more than one.

    The arguments are :func:`compute_nonfinite_moments` summed over the ranks. Ranks that share sequences all count the
    same micro-batch, so ``num_bad`` may be above 1 for a single one.
    """
    return int(index_sum / num_bad) if num_bad and num_bad * square_sum == index_sum**2 else -1


def accepts_samples(model: nn.Module) -> bool:
    """Return whether ``forward`` has the argument ``samples``: each sample's position in the run, (batch,) int64."""
    return "samples" in inspect.signature(model.forward).parameters


def accepts_document_starts(model: nn.Module) -> bool:
    """Return whether ``forward`` has the argument ``document_starts``: (batch, length) int64."""
    return DOCUMENT_STARTS in inspect.signature(model.forward).parameters


def call_model(model: nn.Module, inputs: Any, samples: torch.Tensor | None) -> Any:
    """Call ``model`` with a tensor, a tuple or a dict of inputs, and with ``samples`` unless it is None."""
    extra_kwargs = {} if samples is None else {"samples": samples}
    if isinstance(inputs, dict):
        return model(**inputs, **extra_kwargs)
    return model(*inputs, **extra_kwargs) if isinstance(inputs, (tuple, list)) else model(inputs, **extra_kwargs)
