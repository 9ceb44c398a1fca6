"""The comparison of compiled with uncompiled layers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.train.profiling.compile_trial import _gather_differences, _warn_of_differences

NAN = math.nan


@pytest.mark.parametrize(
    ("eager", "compiled", "expected"),
    [
        ((2.0, 4.0), (2.0, 5.0), {"loss_difference": 0.0, "grad_norm_difference": 0.25}),
        ((2.0, 4.0), (NAN, 4.0), {"loss_difference": math.inf, "grad_norm_difference": 0.0}),
        ((NAN, 4.0), (NAN, 4.0), {"grad_norm_difference": 0.0}),  # of a stage before the last, which has no loss
    ],
)
def test_only_a_finite_uncompiled_value_is_compared(
    eager: tuple[float, float], compiled: tuple[float, float], expected: dict[str, float]
) -> None:
    assert _gather_differences(Ranks(), eager, compiled) == expected


def test_compiled_loss_that_is_not_finite_warns() -> None:
    events: list[dict[str, Any]] = []
    _warn_of_differences({"loss_difference": math.inf}, "fp32", lambda name, **fields: events.append(fields))
    (event,) = events
    assert "the loss of the compiled layers is not finite" in event["text"] and event["value"] is None
