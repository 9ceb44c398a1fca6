"""Verdict on a goal, from pairwise ratios that are too few and too uneven for a mean."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

Verdict = Literal["met", "missed", "noisy"]

MIN_PAIRS = 7
_CONFIDENCE = 0.85


@dataclass(frozen=True)
class Goal:
    """A bound on the median ratio."""

    bound: float
    side: Literal["at most", "at least", "less than"]

    def __str__(self) -> str:
        return f"{self.side} {self.bound:g}"

    def is_met(self, ratio: float) -> bool:
        if self.side == "at least":
            return ratio >= self.bound
        return ratio <= self.bound if self.side == "at most" else ratio < self.bound


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that contains the true median with a confidence of at least 85 %, whatever the distribution.

    Its ends are two of the values. Of seven values, these are the second and the sixth, so that one outlier changes
    nothing; of fewer than four, the first and the last, with a lower confidence.
    """
    ordered = sorted(values)
    n, outside = len(ordered), 0.0
    for skipped in range(n):
        # The number of values below the true median is distributed like the heads of n coins.
        outside += 2 * comb(n, skipped) / 2**n
        if 1 - outside < _CONFIDENCE:
            break
    skipped = max(0, skipped - 1)
    return ordered[skipped], ordered[n - 1 - skipped]


def verdict(ratios: Sequence[float], goal: Goal) -> Verdict:
    """Return whether the goal is met; ``noisy`` with too few pairs or an interval that does not decide.

    It does not decide if the goal is inside it and half its width is more than half of what the goal allows.
    """
    if len(ratios) < MIN_PAIRS:
        return "noisy"
    low, high = interval(ratios)
    if goal.is_met(low) != goal.is_met(high) and (high - low) / 2 > abs(goal.bound - 1) / 2:
        return "noisy"
    return "met" if goal.is_met(statistics.median(ratios)) else "missed"
