from __future__ import annotations

import pytest

from clustertrain.spec.recipe import ScheduleSpec
from clustertrain.train.schedule import warmup_cosine, warmup_steps


@pytest.mark.parametrize(("step", "rate"), [(1_000, 2e-4), (5_000, 1e-3), (52_500, 5e-4), (100_000, 0.0)])
def test_fixed_points(step: int, rate: float) -> None:
    assert warmup_cosine(step, 100_000, peak=1e-3, warmup=5_000, floor=0.0) == pytest.approx(rate, abs=1e-12)


def test_floor_is_a_fraction_of_the_peak_and_holds_after_the_end() -> None:
    assert warmup_cosine(100, 100, peak=2.0, warmup=10, floor=0.1) == pytest.approx(0.2)
    assert warmup_cosine(150, 100, peak=2.0, warmup=10, floor=0.1) == pytest.approx(0.2)


def test_warmup_is_two_percent_by_default_and_can_be_none() -> None:
    assert warmup_steps(ScheduleSpec(), 1_000) == 20
    assert warmup_steps(ScheduleSpec(), 10) == 1
    assert warmup_steps(ScheduleSpec(warmup_steps=0), 1_000) == 0
    assert warmup_cosine(1, 100, peak=1.0, warmup=0, floor=0.0) < 1.0


def test_warmup_longer_than_the_run_only_rises() -> None:
    rates = [warmup_cosine(s, 10, peak=1.0, warmup=20, floor=0.1) for s in range(1, 11)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.5)
