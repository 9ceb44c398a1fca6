"""The best so far, patience, a rising loss, slices; and which evaluations are due."""

from __future__ import annotations

import math
from typing import Any

import pytest

from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.evaluation.best_metric import EarlyStopping
from clustertrain.train.evaluation.schedule import EvaluationSchedule


def seen(judge: EarlyStopping, values: list[float], name: str = "validation_loss", first: int = 1) -> list[Any]:
    return [judge.observe(first + i, {name: v}) for i, v in enumerate(values)]


def test_the_best_is_the_least_or_the_most_and_the_first_of_equals() -> None:
    least, most = EarlyStopping(), EarlyStopping("validation_accuracy", higher_is_better=True)
    assert [v.is_best for v in seen(least, [3.0, 2.0, 2.0, math.nan, 2.5])] == [True, True, False, False, False]
    assert (least.best, least.best_step) == (2.0, 2)
    seen(most, [0.1, 0.4, 0.3], "validation_accuracy")
    assert (most.best, most.best_step) == (0.4, 2)


def test_patience_counts_evaluations_without_a_better_one() -> None:
    found = seen(EarlyStopping(patience=2), [3.0, 3.1, 2.9, 2.9, math.nan])
    assert [bool(v.stop_reason) for v in found] == [False, False, False, False, True]
    assert found[-1].stop_reason == (
        "early stop: validation_loss has not been better for 2 evaluations (evaluation.patience = 2); "
        "the best is 2.9 at step 3"
    )
    assert not any(v.stop_reason for v in seen(EarlyStopping(), [1.0] * 50))


def test_a_rising_loss_is_told_each_k_in_a_row() -> None:
    found = seen(EarlyStopping(rising_limit=2), [1.0, 1.1, 1.2, 1.3, 1.4, 1.0, 1.1, math.nan])
    assert [v.num_rising for v in found] == [0, 0, 2, 0, 4, 0, 0, 2]
    assert not any(v.num_rising for v in seen(EarlyStopping(rising_limit=0), [1.0, 2.0, 3.0]))


def test_slices_have_their_own_best() -> None:
    judge = EarlyStopping("validation_accuracy", higher_is_better=True, slices=("night", "rain"))
    for step, night in ((1, 0.5), (2, 0.8), (3, 0.7)):
        judge.observe(step, {"validation_accuracy": 0.9, "validation_accuracy/night": night})
    assert judge.slices == {"night": {"value": 0.7, "best": 0.8}}


def test_a_slice_that_began_without_a_number_has_the_first_one_as_its_best() -> None:
    judge = EarlyStopping("validation_loss", higher_is_better=False, slices=("night",))
    for step, value in enumerate((math.nan, 1.0, 0.5, math.nan)):
        judge.observe(step, {"validation_loss": 1.0, "validation_loss/night": value})
    assert judge.slices["night"]["best"] == 0.5


def test_a_metric_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'validation_f1' is none .* there are validation_loss, validation_accuracy"):
        EarlyStopping("validation_f1").observe(1, {"validation_loss": 1.0, "validation_accuracy": 0.5})


@pytest.mark.parametrize("stop", range(1, 8))
def test_a_judge_goes_on_after_a_resume(stop: int) -> None:
    values = [3.0, 3.1, 3.2, 2.0, 2.1, 2.2, 2.3, 2.4]
    options: dict[str, Any] = {"patience": 4, "rising_limit": 2}
    whole = seen(EarlyStopping(**options), values)
    before, after = EarlyStopping(**options), EarlyStopping(**options)
    seen(before, values[:stop])
    after.load_state_dict(before.state_dict())
    assert seen(after, values[stop:], first=stop + 1) == whole[stop:]


def test_another_metric_begins_anew_and_keeps_the_loss() -> None:
    before, after = EarlyStopping(), EarlyStopping("validation_accuracy", higher_is_better=True, rising_limit=1)
    seen(before, [1.0])
    after.load_state_dict(before.state_dict())
    assert after.best is None
    assert after.observe(2, {"validation_accuracy": 0.1, "validation_loss": 1.5}).num_rising == 1


def test_what_is_due_and_what_a_stop_has_cut_short() -> None:
    results: list[dict[str, float]] = [{"validation_loss": 2.0}, {}, {"validation_loss": 1.0}]
    told: list[float] = []
    made = EvaluationSchedule(lambda: results.pop(0), every=4, early_stopping=EarlyStopping(), on_value=told.append)
    assert [step for step in range(12) if made.is_due(step, 11)] == [4, 8, 11]
    made.run(4)
    assert (made.is_due(4, 11), made.is_best(4), made.is_best(5)) == (False, True, False)
    assert made.run(8) == {} and made.is_due(8, 11) and not made.is_best(8)
    again = EvaluationSchedule(lambda: results.pop(0), every=4, early_stopping=EarlyStopping(), on_value=told.append)
    again.load_state_dict(made.state_dict())
    assert again.is_due(8, 11)
    again.run(8)
    assert again.is_best(8) and told == [2.0, 1.0]


def test_every_is_at_least_one_step() -> None:
    with pytest.raises(UsageError, match="every = 0"):
        EvaluationSchedule(dict, every=0, early_stopping=EarlyStopping())
