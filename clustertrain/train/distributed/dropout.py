"""Dropout whose mask depends on what is dropped and not on which rank drops it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from clustertrain.checkpoint.core.state_dict import clean_fqn
from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.core import seeds
from clustertrain.train.core.context import RankContext

# What attention modules call the probability that they hand to scaled_dot_product_attention.
_ATTENTION_DROPOUT = ("attention_dropout", "attn_dropout", "attn_pdrop", "dropout_p")


class Dropout(nn.Module):
    """``nn.Dropout`` for tensors (batch, length, ...), with the same mask for a sample under every layout and in a
    recomputation.

    The mask is a hash of the run's seed, the layer's name, the sample's place in the run, the position in the sequence
    and the feature; :func:`configure` gives it the first two and this rank's part of the sequence.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        # A tensor, since a number would be compiled in and every layer then compiled anew; no buffer, since it follows
        # from the seed.
        self.key: torch.Tensor | None = None
        self.chunk = 0  # of the equal parts of a sequence the one that this rank holds
        self.needs_samples = False

    def forward(self, x: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        """``samples`` (batch,) int64: the place of each sample in the run. Without it the mask is drawn from torch's
        generator.

        Raises:
            UsageError: without it under tensor parallel, where ranks that hold the same values would drop others.
        """
        if not self.training or self.p == 0:
            return x
        if samples is None or self.key is None:
            if self.needs_samples:
                raise UsageError(
                    "dropout under tensor parallel needs the samples' places, or its ranks would drop different values",
                    fix="give forward an argument samples and hand it to each Dropout; train_step fills it for what "
                    "session.loader yields",
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
    """What is kept, as booleans (batch, length, features); ``key`` () , ``samples`` (batch,), ``positions`` (length,),
    all int64.

    Each row (sample, position) has a 64-bit hash of its own; an element's is 32 bits of it and of the feature, mixed
    once more by few operations, as they are done on every element.
    """
    # Sums with what was mixed and no products: inductor folds those of an arange into one number, which overflows.
    rows = _splitmix64(_splitmix64(key + samples)[:, None] + positions)
    columns = _splitmix64(key + torch.arange(features, device=key.device))
    hashed = rows.to(torch.int32)[:, :, None] + columns.to(torch.int32)
    for shift, factor in ((15, 0x7FEB352D), (13, 0x846CA68B - (1 << 32))):
        hashed ^= hashed >> shift
        hashed *= factor
    return hashed >= min(round(p * 2**32), 2**32 - 1) - 2**31


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), with
    signed numbers, which wrap as the unsigned ones do."""
    x = (x ^ _logical_shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _logical_shift_right(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    """To the right, filled with zeros; ``>>`` on signed numbers fills with the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def configure(model: nn.Module, context: RankContext, seed: int) -> None:
    """Tell each :class:`Dropout` of ``model`` its seed and which part of the sequences this rank holds."""
    layout = context.layout
    coordinates = layout.coordinates(context.rank)
    chunk = coordinates.cp * layout.tp + coordinates.tp if layout.sequence_parallel else coordinates.cp
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.key = torch.tensor(seeds.derive_seed(seed, "dropout", clean_fqn(name)), device=context.device)
            module.chunk = chunk
            module.needs_samples = layout.tp > 1


def check_no_attention_dropout(model: nn.Module, layout: str) -> None:
    """``layout`` in words. Raises ConfigError where ``model`` drops attention weights."""
    for name, module in model.named_modules():
        probabilities = [getattr(module, a, None) for a in _ATTENTION_DROPOUT]
        if isinstance(module, nn.MultiheadAttention):
            probabilities.append(module.dropout)
        if any(isinstance(p, float) and p > 0 for p in probabilities):
            raise ConfigError(
                f"{name or type(model).__name__} drops attention weights, and {layout} splits the attention: its mask "
                "would depend on the layout",
                fix="set that dropout to 0, and use clustertrain.train.distributed.dropout.Dropout on the residual "
                "branches",
            )
