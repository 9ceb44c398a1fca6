from __future__ import annotations

import math

import numpy as np
import pytest

from clustertrain.telemetry.store.histogram import BINS, Histogram, bin_indices
from clustertrain.telemetry.store.totals import Total


def build_histogram(values: list[float]) -> Histogram:
    histogram = Histogram()
    histogram.add(np.array(values))
    return histogram


@pytest.mark.parametrize("q", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_quantile_is_within_one_percent(q: float) -> None:
    values = np.random.default_rng(3).lognormal(5, 2, 10_000)
    histogram = Histogram()
    histogram.add(values)
    expected = float(np.quantile(values, q, method="inverted_cdf"))
    assert histogram.quantile(q, values.min(), values.max()) == pytest.approx(expected, rel=0.0101)


def test_merge_equals_single_histogram() -> None:
    a, b = build_histogram([0.0, 1.0, 5e9, math.nan]), build_histogram([1.0, 2.0, 3.0])
    a.merge(b)
    whole = build_histogram([0.0, 1.0, 5e9, 1.0, 2.0, 3.0])
    assert (a.bins.tolist(), a.counts.tolist(), a.count) == (whole.bins.tolist(), whole.counts.tolist(), 6)
    empty = Histogram()
    empty.merge(b)
    b.add(np.array([2.0]))
    assert (empty.count, b.count) == (3, 4)  # a copy


def test_extreme_values_have_bins() -> None:
    assert bin_indices(np.array([-1.0, 0.0, 1e-7, 1.1e19, 1e30])).tolist() == [0, 0, 0, BINS - 1, BINS - 1]
    assert build_histogram([0.0] * 9 + [1.0]).quantile(0.5) == 0.0


def test_quantile_of_empty_and_constant() -> None:
    assert math.isnan(Histogram().quantile(0.5))
    assert build_histogram([0.97, 0.97]).quantile(0.5, 0.97, 0.97) == 0.97


@pytest.mark.parametrize(("low", "high"), [(1.0, 9.0), (5.0, 5.0), (math.nan, math.nan)])
def test_totals_merge_extremes(low: float, high: float) -> None:
    """Extremes may be missing on one side."""
    whole = Total(count=1, sum=5.0, low=low, high=high)
    whole.merge(Total(count=2, sum=6.0, low=2.0, high=4.0, histogram=build_histogram([2.0, 4.0])))
    assert (whole.low, whole.high) == (np.fmin(low, 2.0), np.fmax(high, 4.0))
    whole.merge(Total())
    assert (whole.count, whole.sum, whole.histogram.count) == (3, 11.0, 2)
    assert not math.isnan(whole.low)
