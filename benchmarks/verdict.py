"""Whether a goal is met, from ratios that were taken pair by pair and are too few and too uneven for their mean."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

Verdict = Literal["met", "missed", "noisy"]

LEAST = 7  # pairs
_SURE = 0.85


@dataclass(frozen=True)
class Goal:
    """The median ratio is to be at most, or at least, ``bound``."""

    bound: float
    side: Literal["at most", "at least", "less than"]

    def __str__(self) -> str:
        return f"{self.side} {self.bound:g}"

    def holds(self, ratio: float) -> bool:
        if self.side == "at least":
            return ratio >= self.bound
        return ratio <= self.bound if self.side == "at most" else ratio < self.bound


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of endless pairs lies, in 85 of 100 cases or more: between two of the values, however they are
    spread. Of seven these are the second and the sixth, so that one value far off changes nothing; of fewer than four
    the first and the last, which promises less."""
    ordered = sorted(values)
    n, outside = len(ordered), 0.0
    for skipped in range(n):
        # That so many of n lie below the true median is as likely as so many heads of n coins.
        outside += 2 * comb(n, skipped) / 2**n
        if 1 - outside < _SURE:
            break
    skipped = max(0, skipped - 1)
    return ordered[skipped], ordered[n - 1 - skipped]


def verdict(ratios: Sequence[float], goal: Goal) -> Verdict:
    """``noisy`` where the goal lies inside of the interval, unless that reaches no further to either side of its middle
    than half of what the goal allows; and where there are too few pairs."""
    if len(ratios) < LEAST:
        return "noisy"
    low, high = interval(ratios)
    if goal.holds(low) != goal.holds(high) and (high - low) / 2 > abs(goal.bound - 1) / 2:
        return "noisy"
    return "met" if goal.holds(statistics.median(ratios)) else "missed"
