"""Dropout whose mask depends on the element rather than on the rank that computes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn
from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.core import seeds
from clustertrain.train.core.context import RankContext

# Names of the dropout probability in attention modules.
_ATTENTION_DROPOUT = ("attention_dropout", "attn_dropout", "attn_pdrop", "dropout_p")


class Dropout(nn.Module):
    """``nn.Dropout`` for tensors (batch, length, ...) with masks that do not depend on the layout or on recomputation.

    The mask is a hash of the run's seed, the layer's name, the sample's position in the run, the position in the
    sequence and the feature. :func:`configure` sets the first two and this rank's chunk of the sequence.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        # A tensor, because compiled code would specialize on a number in each layer. Not a buffer, because the seed
        # determines it.
        self.key: torch.Tensor | None = None
        self.chunk = 0  # index of this rank's chunk of the sequence
        self.needs_samples = False

    def forward(self, x: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        """Apply dropout.

        Args:
            samples: (batch,) int64, position of each sample in the run. Without it the mask is drawn from torch's
                generator.

        Raises:
            UsageError: ``samples`` is missing under tensor parallelism, where ranks with equal values would drop
                different ones.
        """
        if not self.training or self.p == 0:
            return x
        if samples is None or self.key is None:
            if self.needs_samples:
                raise UsageError(
                    "dropout under tensor parallelism needs the samples' positions: without them ranks drop "
                    "different values",
                    fix="add an argument samples to forward and pass it to each Dropout; train_step fills it for "
                    "batches of session.loader",
                )
            return F.dropout(x, self.p)
        length = x.shape[1]
        first = self.chunk * length
        positions = torch.arange(first, first + length, device=x.device)
        mask = keep_mask(self.key, samples.to(x.device, non_blocking=True), positions, x.shape[2:].numel(), self.p)
        return torch.where(mask.view(x.shape), x / (1 - self.p), 0.0)


@torch.no_grad()
def keep_mask(
    key: torch.Tensor, samples: torch.Tensor, positions: torch.Tensor, features: int, p: float
) -> torch.Tensor:
    """Return which elements to keep, as booleans (batch, length, features).

    Each row (sample, position) has a 64-bit hash. An element combines 32 bits of it with the feature, mixed by few
    operations because they run per element.

    Args:
        key: () int64.
        samples: (batch,) int64.
        positions: (length,) int64.
    """
    # Add hashed values instead of multiplying: inductor folds products with an arange into a constant that overflows.
    rows = _splitmix64(_splitmix64(key + samples)[:, None] + positions)
    columns = _splitmix64(key + torch.arange(features, device=key.device))
    hashed = rows.to(torch.int32)[:, :, None] + columns.to(torch.int32)
    for shift, factor in ((15, 0x7FEB352D), (13, 0x846CA68B - (1 << 32))):
        hashed ^= hashed >> shift
        hashed *= factor
    return hashed >= min(round(p * 2**32), 2**32 - 1) - 2**31


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of splitmix64 to int64, which wraps as uint64 does.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = (x ^ _logical_shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _logical_shift_right(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    """Shift right and fill with zeros; ``>>`` on signed integers fills with the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def configure(model: nn.Module, context: RankContext, seed: int) -> None:
    """Set the key of each :class:`Dropout` of ``model`` and this rank's chunk of the sequences."""
    layout = context.layout
    coordinates = layout.coordinates(context.rank)
    chunk = coordinates.cp * layout.tp + coordinates.tp if layout.sequence_parallel else coordinates.cp
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.key = torch.tensor(seeds.derive_seed(seed, "dropout", clean_fqn(name)), device=context.device)
            module.chunk = chunk
            module.needs_samples = layout.tp > 1


def check_no_attention_dropout(model: nn.Module, layout: str) -> None:
    """Raise ConfigError if ``model`` applies dropout to attention weights; ``layout`` describes the layout in the
    message."""
    for name, module in model.named_modules():
        probabilities = [getattr(module, a, None) for a in _ATTENTION_DROPOUT]
        if isinstance(module, nn.MultiheadAttention):
            probabilities.append(module.dropout)
        if any(isinstance(p, float) and p > 0 for p in probabilities):
            raise ConfigError(
                f"{name or type(model).__name__} applies dropout to attention weights, and {layout} splits the "
                "attention: the mask would depend on the layout",
                fix="set this dropout to 0, and use clustertrain.train.distributed.dropout.Dropout on the residual "
                "branches",
            )
