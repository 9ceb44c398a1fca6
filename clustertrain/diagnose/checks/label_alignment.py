"""Whether targets belong to their inputs. A model learns wrong pairs by heart as well as right ones, and its first loss
is the same: only the data itself tells.

Of tokens the targets are looked for in the inputs, some places on. Of samples with one label each the nearest
neighbours are asked: where they agree better with the labels of the samples before or behind than with a sample's own,
the labels have slipped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

SHIFTS = (1, 0, 2, 3, -1, -2, -3)  # of tokens, the right one first
MIN_MATCH = 0.99  # of the targets, for a shift to be one
SLIPS = (0, 1, -1, 2, -2)  # of labels, by samples
MIN_SLIP_DEVIATIONS = 6.0  # standard deviations above chance, for a slip
MIN_ALIGNED_DEVIATIONS = 3.0  # of the labels as they are: at least some agreement
MAX_FEATURES = 512
NEIGHBOURS = 1


def find_token_shift(inputs: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> int | None:
    """How many places the targets are ahead of the inputs, both (samples, length); None where they are no such copy."""
    for shift in SHIFTS:
        if abs(shift) >= inputs.shape[1]:
            continue
        shifted_inputs = inputs[:, max(shift, 0) : inputs.shape[1] + min(shift, 0)]
        shifted_targets = targets[:, max(-shift, 0) : targets.shape[1] - max(shift, 0)]
        mask = shifted_targets != ignore_index
        if int(mask.sum()) and float((shifted_inputs == shifted_targets)[mask].double().mean()) >= MIN_MATCH:
            return shift
    return None


@dataclass(frozen=True)
class Agreement:
    """With the nearest neighbour, by slip: ``share`` of the classes or the correlation of numbers, and how many
    standard deviations above ``chance`` that is."""

    shares: dict[int, float]
    deviations: dict[int, float]
    chance: float

    @property
    def slip(self) -> int | None:
        """0 where the labels are the samples' own as far as can be told; None where nothing can be."""
        best = max(self.deviations, key=lambda slip: self.deviations[slip])
        if self.deviations[0] >= MIN_ALIGNED_DEVIATIONS or self.deviations[best] < MIN_SLIP_DEVIATIONS:
            return 0 if self.deviations[0] >= MIN_ALIGNED_DEVIATIONS else None
        return best


def measure_agreement(features: torch.Tensor, labels: torch.Tensor) -> Agreement | None:
    """Of neighbouring samples of the data set: ``features`` (samples, …), ``labels`` (samples,) classes, or numbers
    (samples, …). None where all labels are alike or there are too few samples."""
    size = len(labels)
    if size < 64:
        return None
    points = _reduce_features(features)
    distances = torch.cdist(points, points)
    distances.fill_diagonal_(torch.inf)
    nearest = distances.argmin(1)
    interior = torch.arange(max(SLIPS), size - max(SLIPS))
    interior = interior[(nearest[interior] >= max(SLIPS)) & (nearest[interior] < size - max(SLIPS))]
    shares, deviations = {}, {}
    chance = 0.0
    for slip in SLIPS:
        # labels[i + slip] is what sample i would have if they had slipped by it.
        own_labels, neighbour_labels = labels[interior + slip], labels[nearest[interior] + slip]
        if labels.is_floating_point():
            share, deviation = _correlation(own_labels, neighbour_labels)
        else:
            chance = sum((n / len(own_labels)) ** 2 for n in Counter(own_labels.tolist()).values())
            if chance >= 1.0:
                return None
            share = float((own_labels == neighbour_labels).double().mean())
            deviation = (share - chance) / math.sqrt(chance * (1 - chance) / len(own_labels))
        shares[slip], deviations[slip] = share, deviation
    return Agreement(shares, deviations, chance)


def _correlation(own_labels: torch.Tensor, neighbour_labels: torch.Tensor) -> tuple[float, float]:
    """The mean over the columns, and its standard deviations above none."""
    a, b = (
        x.double().reshape(len(x), -1) - x.double().reshape(len(x), -1).mean(0) for x in (own_labels, neighbour_labels)
    )
    spread = (a.square().sum(0) * b.square().sum(0)).sqrt()
    if not bool((spread > 0).any()):
        return 0.0, 0.0
    correlation = float(((a * b).sum(0) / spread.clamp(min=1e-300)).mean())
    return correlation, correlation * math.sqrt(len(own_labels))


def _reduce_features(features: torch.Tensor) -> torch.Tensor:
    """(samples, at most MOST_FEATURES), each of the spread 1: neighbours that are each a mean, so that noise goes."""
    flat = features.double().flatten(1)
    if flat.shape[1] > MAX_FEATURES:
        flat = torch.nn.functional.adaptive_avg_pool1d(flat[:, None], MAX_FEATURES)[:, 0]
    flat = flat - flat.mean(0)
    return flat / flat.std(0).clamp(min=1e-12)


def format_slip(slip: int) -> str:
    nouns: Sequence[str] = ("sample", "samples")
    return f"{abs(slip)} {nouns[abs(slip) > 1]} {'further on' if slip > 0 else 'before'}"
