"""Histograms with fixed logarithmic bins, 2 % apart: any two can be merged, and quantiles are exact to 1 %."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

GROWTH = 1.02
MIN_VALUE = 1e-6  # lower values count as 0; no registered field is negative
_LOG_GROWTH = math.log(GROWTH)
# Bin 0 holds zeros; bin i > 0 starts at MIN_VALUE * GROWTH**(i - 1); the last holds all values from about 1e19.
BINS = 2 + math.ceil(math.log(1e19 / MIN_VALUE) / _LOG_GROWTH)


def bin_indices(values: npt.NDArray[np.floating]) -> npt.NDArray[np.intp]:
    """Return the bin of each value; no value may be NaN."""
    clamped = np.maximum(values, MIN_VALUE * (1 - 1e-12))
    indices: npt.NDArray[np.intp] = np.floor(np.log(clamped / MIN_VALUE) / _LOG_GROWTH).astype(np.intp) + 1
    return np.clip(indices, 0, BINS - 1)


class Histogram:
    """Counts of values per bin."""

    __slots__ = ("bins", "counts")

    def __init__(self, bins: Counts | None = None, counts: Counts | None = None) -> None:
        """Create a histogram from unique ascending ``bins`` and their ``counts``; empty by default."""
        self.bins = np.empty(0, dtype=np.int64) if bins is None else bins
        self.counts = np.empty(0, dtype=np.int64) if counts is None else counts

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def add(self, values: Column) -> None:
        """Count ``values``, ignoring NaN."""
        finite = values[np.isfinite(values)]
        bins, counts = np.unique(bin_indices(finite), return_counts=True)
        self.merge(Histogram(bins.astype(np.int64), counts.astype(np.int64)))

    def merge(self, other: Histogram) -> None:
        """Add the counts of ``other``."""
        if not len(other.bins):
            return
        if not len(self.bins):
            self.bins, self.counts = other.bins, other.counts  # shared: neither is ever changed in place
            return
        bins = np.union1d(self.bins, other.bins)
        counts = np.zeros(len(bins), dtype=np.int64)
        counts[np.searchsorted(bins, self.bins)] += self.counts
        counts[np.searchsorted(bins, other.bins)] += other.counts
        self.bins, self.counts = bins, counts

    def quantile(self, q: float, low: float = 0.0, high: float = math.inf) -> float:
        """Return the quantile ``q`` within 1 %; NaN for an empty histogram.

        Args:
            low: the smallest value counted, if known.
            high: the largest value counted, if known; the result is clamped to both.
        """
        if not len(self.counts):
            return math.nan
        if low == high:
            return low
        cumulative = self.counts.cumsum()
        index = min(int(cumulative.searchsorted(q * float(cumulative[-1]))), len(cumulative) - 1)
        return min(max(_bin_center(int(self.bins[index])), low), high)


def _bin_center(bin_index: int) -> float:
    return 0.0 if bin_index == 0 else MIN_VALUE * math.exp((bin_index - 0.5) * _LOG_GROWTH)
