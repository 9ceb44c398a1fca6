"""The course of the loss, from the rows of a run."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from typing import Any

import pytest

from clustertrain.train.stability.loss_trend import GAP_COLUMN, LossTrend


class Run:
    """Rows of a run and the codes that they raised."""

    def __init__(self, first_step: int = 1) -> None:
        self.trend = LossTrend()
        self.steps = itertools.count(first_step)
        self.noise = random.Random(1)

    def train(self, losses: Iterable[float], lr: float | Iterable[float] = 1e-3, **extra: Any) -> list[str]:
        rates = itertools.repeat(lr) if isinstance(lr, float) else lr
        codes = []
        for loss, rate in zip(losses, rates, strict=False):
            row = {"step": next(self.steps), "loss": loss, "lr": rate, **extra}
            self.trend.add_gap(row)
            self.last_row = row
            codes += [finding.code for finding in self.trend.observe(row)]
        return codes

    def evaluate(self, train: float, validation: float, steps: int = 40) -> list[str]:
        codes = self.train([train] * (steps - 1))
        return codes + self.train([train], validation_loss=validation)

    def noisy(self, center: float, spread: float, steps: int) -> list[float]:
        return [center + self.noise.gauss(0, spread) for _ in range(steps)]


def test_flat_loss_is_found_once_the_rate_no_longer_rises() -> None:
    run = Run()
    assert run.train([5.57] * 99) == []
    assert set(run.train(run.noisy(5.57, 0.02, 50))) == {"loss_flat"}


def test_flat_loss_during_warmup_is_not_reported() -> None:
    assert Run().train([5.57] * 400, lr=[1e-6 * step for step in range(400)]) == []


def test_falling_or_converged_loss_is_not_reported() -> None:
    run = Run()
    assert run.train([1.0 + 4.0 * math.exp(-step / 100) for step in range(400)]) == []
    assert run.train(run.noisy(1.0, 0.05, 400)) == []


def test_resumed_attempt_does_not_report_a_converged_loss() -> None:
    assert Run(first_step=5001).train([1.0] * 400) == []


def test_rows_without_loss_or_rate_are_ignored() -> None:
    run = Run()
    assert run.train([math.nan] * 300) == []
    assert [list(run.trend.observe({"step": step, "loss": 2.0})) for step in range(1, 300)] == [[]] * 299


def test_oscillating_loss_is_found() -> None:
    run = Run()
    assert run.train([5.5] * 20) == []
    assert set(run.train([3.0, 30.0] * 100)) == {"loss_oscillating"}


def test_oscillation_of_a_negative_loss_is_found() -> None:
    run = Run()
    assert run.train([-5.5] * 20) == []
    assert set(run.train([-3.0, -9.0] * 100)) == {"loss_oscillating"}
    falling = Run()
    assert falling.train([1.0 - 0.1 * step for step in range(300)]) == []


def test_noise_around_a_small_loss_is_not_oscillation() -> None:
    run = Run()
    assert run.train([2.0 * math.exp(-step / 50) for step in range(300)]) == []
    assert run.train([abs(loss) for loss in run.noisy(0.01, 0.01, 300)]) == []


def test_gap_is_that_of_the_step_whatever_came_before() -> None:
    """A resumed attempt, which has not seen the steps before, writes the same row."""
    run = Run()
    run.train([4.0, 2.0])
    run.train([3.0], validation_loss=3.5)
    assert run.last_row[GAP_COLUMN] == pytest.approx(0.5)
    run.train([2.0])
    assert GAP_COLUMN not in run.last_row


def test_evaluation_without_a_training_loss_has_no_gap() -> None:
    row: dict[str, Any] = {"step": 7, "validation_loss": 2.0}
    LossTrend().add_gap(row)
    assert GAP_COLUMN not in row


def test_widening_gap_is_found() -> None:
    run = Run()
    losses = [(2.0, 2.0), (1.0, 1.7), (0.5, 1.6), (0.2, 1.6)]
    assert [run.evaluate(*pair) for pair in losses] == [[], [], [], ["gap_widening"]]


def test_small_or_steady_gap_is_not_reported() -> None:
    run = Run()
    assert [run.evaluate(*pair) for pair in ((2.0, 2.0), (1.9, 1.91), (1.8, 1.83), (1.7, 1.75))] == [[]] * 4
    run = Run()
    assert [run.evaluate(*pair) for pair in ((2.0, 3.0), (1.5, 2.5), (1.0, 2.0), (0.5, 1.5))] == [[]] * 4


def test_underfit_is_found_when_both_losses_level_off_high() -> None:
    run = Run()
    assert run.train([5.0] * 30 + [4.5] * 100) == []
    codes = [run.evaluate(4.5, 4.6) for _ in range(5)]
    assert codes == [[], [], [], [], ["underfitting"]]  # the first one includes the steps of the fall


def test_losses_that_level_off_low_are_not_underfit() -> None:
    run = Run()
    run.train([5.0] * 30 + [1.5] * 100)
    assert [run.evaluate(1.5, 1.6) for _ in range(5)] == [[]] * 5
