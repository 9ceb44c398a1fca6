"""Types and small functions of a training step that several packages use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from clustertrain.checkpoint.core.state_dict import is_dtensor
from clustertrain.train.core.async_copy import AsyncCopy

# (output, target) -> mean over the samples, or (sum, how many it is the sum of).
Loss = Callable[[Any, Any], "torch.Tensor | tuple[torch.Tensor, torch.Tensor | int]"]


@dataclass(frozen=True)
class StepResult:
    """``loss`` is the mean over the global batch, ``grad_norm`` the norm of its gradient before clipping: tensors on
    the device, equal on all ranks, as all here. ``skipped``: the weights were left as they are, since the loss or the
    gradient is not finite, or the loss is a spike and the recipe wants such steps skipped. Of a step that counts
    nothing (all targets masked) the loss is nan, a mean of nothing, and the gradient zero.

    ``clipped``: whether clipping has changed the gradient; ``clip_fraction``: of the last 100 steps the share of those;
    ``finite``: of loss and gradient; ``spike``: the loss is far above the last ones; ``bad``:
    :func:`compute_nonfinite_moments` of the
    micro-batches of all data-parallel ranks; ``overflow``: the gradient of the scaled loss left the range of fp16,
    which the loss scale takes care of: such a step is skipped and not bad; ``layers``: figures by layer, of a step in
    which they were asked for."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    clipped: torch.Tensor
    clip_fraction: torch.Tensor
    finite: torch.Tensor
    spike: torch.Tensor
    bad: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    overflow: bool = False
    layers: AsyncCopy | None = None


def as_sum_and_count(value: Any, target: Any, is_padding: bool) -> tuple[torch.Tensor, torch.Tensor | int]:
    """What a loss function returned, as a sum and its count; nothing for a micro-batch that only fills a gap."""
    if isinstance(value, tuple):
        total, count = value
    else:
        count = len(target[0] if isinstance(target, (tuple, list)) else target)
        total = value * count
    if is_dtensor(total):
        total = total.full_tensor()  # a loss of split logits, the same on their ranks
    return (total * 0, 0) if is_padding else (total, count)


def pack_sum_count(total: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """A micro-batch's (sum of losses, count) in fp64, on the device; no host sync."""
    if not isinstance(count, torch.Tensor):
        count = torch.full((), count, device=total.device)  # filled there: a copy would make the host wait
    return torch.stack([total.double(), count.to(total.device).double()])


def index_powers(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Of ``count`` micro-batches' numbers from ``first`` on the powers 0, 1 and 2, (count, 3) in fp64."""
    indices = torch.arange(first, first + count, dtype=torch.float64, device=device)
    return torch.stack([torch.ones_like(indices), indices, indices.square()], 1)


def compute_nonfinite_moments(totals: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """Of the micro-batches whose loss is not finite the sum of the :func:`index_powers` of their numbers. The sum over
    the ranks tells which one it is, where it is a single one: :func:`sole_bad_micro_batch`.

    Args:
        totals: (sum of losses, count) of each micro-batch, (micro-batches, 2).
    """
    return ((~totals[:, :1].isfinite()).double() * powers).sum(0)


def sole_bad_micro_batch(num_bad: float, index_sum: float, square_sum: float) -> int:
    """The number that these are the :func:`compute_nonfinite_moments` of; -1: there is none, or more than one. Ranks
    that have parts of the same sequences count the same micro-batch several times."""
    return int(index_sum / num_bad) if num_bad and num_bad * square_sum == index_sum**2 else -1


def accepts_samples(model: nn.Module) -> bool:
    """Whether ``forward`` has an argument ``samples``: the place of each sample in the run, (batch,) int64."""
    return "samples" in inspect.signature(model.forward).parameters


def call_model(model: nn.Module, inputs: Any, samples: torch.Tensor | None) -> Any:
    extra_kwargs = {} if samples is None else {"samples": samples}
    if isinstance(inputs, dict):
        return model(**inputs, **extra_kwargs)
    return model(*inputs, **extra_kwargs) if isinstance(inputs, (tuple, list)) else model(inputs, **extra_kwargs)
