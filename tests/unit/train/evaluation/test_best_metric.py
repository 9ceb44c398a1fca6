"""Best value, patience, rising loss and slices, and the schedule of evaluations."""

from __future__ import annotations

import math
from typing import Any

import pytest

from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.evaluation.best_metric import EarlyStopping
from clustertrain.train.evaluation.schedule import EvaluationSchedule


def observe_all(
    stopping: EarlyStopping, values: list[float], name: str = "validation_loss", first: int = 1
) -> list[Any]:
    return [stopping.observe(first + i, {name: v}) for i, v in enumerate(values)]


def test_best_follows_direction_and_keeps_the_first_of_equals() -> None:
    lowest, highest = EarlyStopping(), EarlyStopping("validation_accuracy", higher_is_better=True)
    assert [v.is_best for v in observe_all(lowest, [3.0, 2.0, 2.0, math.nan, 2.5])] == [True, True, False, False, False]
    assert (lowest.best, lowest.best_step) == (2.0, 2)
    observe_all(highest, [0.1, 0.4, 0.3], "validation_accuracy")
    assert (highest.best, highest.best_step) == (0.4, 2)


def test_patience_counts_evaluations_without_improvement() -> None:
    verdicts = observe_all(EarlyStopping(patience=2), [3.0, 3.1, 2.9, 2.9, math.nan])
    assert [bool(v.stop_reason) for v in verdicts] == [False, False, False, False, True]
    assert verdicts[-1].stop_reason == (
        "early stop: validation_loss has not improved for 2 evaluations (evaluation.patience = 2); best: 2.9 at step 3"
    )
    assert not any(v.stop_reason for v in observe_all(EarlyStopping(), [1.0] * 50))


def test_rising_loss_is_reported_every_k_evaluations() -> None:
    verdicts = observe_all(EarlyStopping(rising_limit=2), [1.0, 1.1, 1.2, 1.3, 1.4, 1.0, 1.1, math.nan])
    assert [v.num_rising for v in verdicts] == [0, 0, 2, 0, 4, 0, 0, 2]
    assert not any(v.num_rising for v in observe_all(EarlyStopping(rising_limit=0), [1.0, 2.0, 3.0]))


def test_slices_have_separate_bests() -> None:
    stopping = EarlyStopping("validation_accuracy", higher_is_better=True, slices=("night", "rain"))
    for step, night in ((1, 0.5), (2, 0.8), (3, 0.7)):
        stopping.observe(step, {"validation_accuracy": 0.9, "validation_accuracy/night": night})
    assert stopping.slices == {"night": {"value": 0.7, "best": 0.8}}


def test_slice_best_ignores_nan() -> None:
    stopping = EarlyStopping("validation_loss", higher_is_better=False, slices=("night",))
    for step, value in enumerate((math.nan, 1.0, 0.5, math.nan)):
        stopping.observe(step, {"validation_loss": 1.0, "validation_loss/night": value})
    assert stopping.slices["night"]["best"] == 0.5


def test_missing_metric_lists_the_available_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'validation_f1' is not produced .* available: validation_loss, validation_accuracy"
    ):
        EarlyStopping("validation_f1").observe(1, {"validation_loss": 1.0, "validation_accuracy": 0.5})


@pytest.mark.parametrize("stop", range(1, 8))
def test_early_stopping_state_survives_a_checkpoint(stop: int) -> None:
    values = [3.0, 3.1, 3.2, 2.0, 2.1, 2.2, 2.3, 2.4]
    options: dict[str, Any] = {"patience": 4, "rising_limit": 2}
    whole = observe_all(EarlyStopping(**options), values)
    before, after = EarlyStopping(**options), EarlyStopping(**options)
    observe_all(before, values[:stop])
    after.load_state_dict(before.state_dict())
    assert observe_all(after, values[stop:], first=stop + 1) == whole[stop:]


def test_changed_metric_drops_the_best_and_keeps_the_loss() -> None:
    before, after = EarlyStopping(), EarlyStopping("validation_accuracy", higher_is_better=True, rising_limit=1)
    observe_all(before, [1.0])
    after.load_state_dict(before.state_dict())
    assert after.best is None
    assert after.observe(2, {"validation_accuracy": 0.1, "validation_loss": 1.5}).num_rising == 1


def test_interrupted_evaluation_stays_due() -> None:
    results: list[dict[str, float]] = [{"validation_loss": 2.0}, {}, {"validation_loss": 1.0}]
    values_received: list[float] = []
    schedule_before = EvaluationSchedule(
        lambda: results.pop(0), every=4, early_stopping=EarlyStopping(), on_value=values_received.append
    )
    assert [step for step in range(12) if schedule_before.is_due(step, 11)] == [4, 8, 11]
    schedule_before.run(4)
    assert not schedule_before.is_due(4, 11)
    assert schedule_before.is_best(4) and not schedule_before.is_best(5)
    assert schedule_before.run(8) == {} and schedule_before.is_due(8, 11) and not schedule_before.is_best(8)
    schedule_after = EvaluationSchedule(
        lambda: results.pop(0), every=4, early_stopping=EarlyStopping(), on_value=values_received.append
    )
    schedule_after.load_state_dict(schedule_before.state_dict())
    assert schedule_after.is_due(8, 11)
    schedule_after.run(8)
    assert schedule_after.is_best(8) and values_received == [2.0, 1.0]


def test_every_must_be_at_least_one_step() -> None:
    with pytest.raises(UsageError, match="every = 0"):
        EvaluationSchedule(dict, every=0, early_stopping=EarlyStopping())
