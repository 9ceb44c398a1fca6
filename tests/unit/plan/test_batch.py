"""Arithmetic of the batch split."""

from __future__ import annotations

import pytest

from clustertrain.errors import ConfigError
from clustertrain.plan.batch import divisors, split_batch


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 48])
@pytest.mark.parametrize("global_batch", [48, 96, 480])
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_split_product_is_global_batch(ranks: int, global_batch: int, limit: int) -> None:
    batch = split_batch(global_batch, ranks, 128, fits=lambda m: m <= limit)
    assert batch.micro_batch * batch.grad_accum * ranks == global_batch
    assert batch.micro_batch <= limit
    assert batch.tokens_per_step == global_batch * 128


def test_largest_fitting_micro_batch_is_chosen() -> None:
    assert split_batch(64, 2, 1, fits=lambda m: m <= 9).micro_batch == 8


def test_smallest_micro_batch_if_none_fits() -> None:
    assert split_batch(64, 2, 1, fits=lambda m: False).micro_batch == 1


def test_indivisible_batch_shows_arithmetic() -> None:
    with pytest.raises(ConfigError) as e:
        split_batch(100, 8, 1, fits=lambda m: True)
    assert "100 / 8 = 12.5" in str(e.value)
    assert "96 or 104" in str(e.value)


def test_batch_below_ranks_suggests_one_multiple() -> None:
    with pytest.raises(ConfigError, match="global batch of 8,"):
        split_batch(4, 8, 1, fits=lambda m: True)


def test_set_micro_batch_must_divide() -> None:
    assert split_batch(64, 4, 1, micro_batch=2, fits=lambda m: False).grad_accum == 8
    with pytest.raises(ConfigError) as e:
        split_batch(64, 4, 1, micro_batch=3, fits=lambda m: True)
    assert "64 / (3 x 4) = 5.33333" in str(e.value)
    assert "60 or 72" in str(e.value)


def test_divisors_are_largest_first() -> None:
    assert divisors(36) == [36, 18, 12, 9, 6, 4, 3, 2, 1]
