"""Detect targets that do not match their inputs.

A model memorizes wrong pairs as well as right ones, from the same initial loss, so only the data reveals them. For
tokens, the targets are searched in the inputs at several shifts. For samples with one label each, nearest neighbors
are compared: if they agree only after every label moves by one or two samples, the labels are shifted (a "slip").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

SHIFTS = (1, 0, 2, 3, -1, -2, -3)  # tokens, the correct shift first
MIN_MATCH = 0.99  # share of the targets that must match at a shift
SLIPS = (0, 1, -1, 2, -2)  # samples
MIN_SLIP_DEVIATIONS = 6.0  # standard deviations above chance that prove a slip
MIN_ALIGNED_DEVIATIONS = 3.0  # standard deviations above chance that prove unshifted labels
MAX_FEATURES = 512


def find_token_shift(inputs: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> int | None:
    """Return how many tokens the targets are ahead of the inputs, both (samples, length); None if no shift matches."""
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
    """Agreement between the labels of nearest neighbors, by slip."""

    shares: dict[int, float]
    """Share of equal classes, or correlation of numeric targets."""
    deviations: dict[int, float]
    """Standard deviations above ``chance``."""
    chance: float

    @property
    def slip(self) -> int | None:
        """Return the slip of the labels, 0 if they match their samples, None if the data is inconclusive."""
        best = max(self.deviations, key=lambda slip: self.deviations[slip])
        if self.deviations[0] >= MIN_ALIGNED_DEVIATIONS or self.deviations[best] < MIN_SLIP_DEVIATIONS:
            return 0 if self.deviations[0] >= MIN_ALIGNED_DEVIATIONS else None
        return best


def measure_agreement(features: torch.Tensor, labels: torch.Tensor) -> Agreement | None:
    """Measure how well the labels of nearest neighbors agree, for consecutive samples of the dataset.

    ``features`` is (samples, …); ``labels`` are classes (samples,) or numbers (samples, …). Return None if all labels
    are equal or there are too few samples.
    """
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
        # labels[i + slip] is the right label of sample i if the labels are shifted by ``slip``.
        sample_labels, neighbor_labels = labels[interior + slip], labels[nearest[interior] + slip]
        if labels.is_floating_point():
            share, deviation = _correlation(sample_labels, neighbor_labels)
        else:
            chance = sum((n / len(sample_labels)) ** 2 for n in Counter(sample_labels.tolist()).values())
            if chance >= 1.0:
                return None
            share = float((sample_labels == neighbor_labels).double().mean())
            deviation = (share - chance) / math.sqrt(chance * (1 - chance) / len(sample_labels))
        shares[slip], deviations[slip] = share, deviation
    return Agreement(shares, deviations, chance)


def _correlation(sample_labels: torch.Tensor, neighbor_labels: torch.Tensor) -> tuple[float, float]:
    """Return the correlation averaged over the columns, and its standard deviations above 0."""
    a, b = (
        x.double().reshape(len(x), -1) - x.double().reshape(len(x), -1).mean(0)
        for x in (sample_labels, neighbor_labels)
    )
    spread = (a.square().sum(0) * b.square().sum(0)).sqrt()
    if not bool((spread > 0).any()):
        return 0.0, 0.0
    correlation = float(((a * b).sum(0) / spread.clamp(min=1e-300)).mean())
    return correlation, correlation * math.sqrt(len(sample_labels))


def _reduce_features(features: torch.Tensor) -> torch.Tensor:
    """Return (samples, at most MAX_FEATURES) with unit variance; adjacent features are averaged to reduce noise."""
    flat = features.double().flatten(1)
    if flat.shape[1] > MAX_FEATURES:
        flat = torch.nn.functional.adaptive_avg_pool1d(flat[:, None], MAX_FEATURES)[:, 0]
    flat = flat - flat.mean(0)
    return flat / flat.std(0).clamp(min=1e-12)


def format_slip(slip: int) -> str:
    """Return the slip as text, such as "1 sample after"."""
    nouns: Sequence[str] = ("sample", "samples")
    return f"{abs(slip)} {nouns[abs(slip) > 1]} {'after' if slip > 0 else 'before'}"
