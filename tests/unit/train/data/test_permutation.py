"""The order of the samples."""

from __future__ import annotations

import numpy as np
import pytest

from clustertrain.train.data.permutation import Permutation, samples_at


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 1000, 4097])
def test_each_sample_occurs_once_per_epoch(size: int) -> None:
    assert sorted(samples_at(7, size, 0, size)) == list(range(size))
    assert sorted(samples_at(7, size, size, size)) == list(range(size))


def test_order_is_a_function_of_seed_epoch_and_index() -> None:
    whole = samples_at(3, 1000, 0, 2500)
    assert samples_at(3, 1000, 0, 2500) == whole
    assert samples_at(3, 1000, 990, 20) == whole[990:1010]  # across the end of an epoch
    assert samples_at(4, 1000, 0, 1000) != whole[:1000]
    assert whole[:1000] != whole[1000:2000]


def test_large_permutation_needs_no_list() -> None:
    size = 10**15
    order = Permutation(size, 1, 0)
    indices = order(np.arange(10_000, dtype=np.uint64))
    assert len(set(indices.tolist())) == 10_000
    assert int(indices.max()) < size


def test_order_has_no_correlation() -> None:
    order = np.array(samples_at(5, 20_000, 0, 20_000), dtype=float)
    neighbors = np.corrcoef(order[:-1], order[1:])[0, 1]
    position = np.corrcoef(np.arange(20_000), order)[0, 1]
    assert abs(neighbors) < 0.03
    assert abs(position) < 0.03


def test_order_is_frozen() -> None:
    # If it changed, resumed runs would silently repeat and skip samples.
    assert samples_at(1, 100, 0, 8) == [75, 9, 73, 85, 69, 31, 59, 14]
