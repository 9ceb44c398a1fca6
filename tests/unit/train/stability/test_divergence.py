"""Divergence policy: counts, stops and rollbacks, independent of when values arrive."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from clustertrain.config.stability import StabilitySpec
from clustertrain.errors import Diverged
from clustertrain.train.core.step_types import StepResult
from clustertrain.train.stability.divergence import DivergencePolicy, PositionHistory, Rollback


def make_result(loss: float = 1.0, *, skipped: bool = False, spike: bool = False, overflow: bool = False) -> StepResult:
    flag = torch.tensor(False)
    return StepResult(
        loss=torch.tensor(loss),
        grad_norm=torch.tensor(1.0),
        skipped=torch.tensor(skipped),
        clipped=flag,
        clip_fraction=torch.tensor(0.0),
        finite=torch.tensor(math.isfinite(loss)),
        spike=torch.tensor(spike),
        bad=(flag, flag, flag),
        overflow=overflow,
    )


BAD = make_result(math.nan, skipped=True)


def run(policy: DivergencePolicy, steps: list[StepResult], first: int = 1) -> list[tuple[int, Rollback]]:
    """Return (step, rollback) pairs, where the rollback was requested after the step."""
    rollbacks = []
    for number, result in enumerate(steps, start=first):
        policy.enqueue(number, result)
        rollback = policy.check(number)
        if rollback is not None:
            rollbacks.append((number, rollback))
    return rollbacks


def make_policy(lag: int = 0, **spec: Any) -> DivergencePolicy:
    return DivergencePolicy(StabilitySpec(**spec), lag)


def test_too_many_consecutive_skips_raise() -> None:
    policy = make_policy(max_skipped=3)
    run(policy, [make_result(), BAD, BAD, make_result(), BAD, BAD, make_result()])
    assert policy.skipped == 4
    with pytest.raises(Diverged, match="3 steps in a row were skipped, 8 to 10: the loss is nan") as caught:
        run(policy, [BAD, BAD, BAD], first=8)
    assert caught.value.exit_code == 78 and "requeue" in caught.value.message


def test_consecutive_skips_roll_back_to_the_first() -> None:
    policy = make_policy(max_skipped=3, on_divergence="roll-back")
    ((after, rollback),) = run(policy, [make_result(), BAD, BAD, BAD, make_result()])
    assert (after, rollback.first_step, rollback.last_step) == (4, 2, 4)
    assert not run(policy, [BAD, BAD, make_result()], first=2)  # the count starts over


def test_spike_rolls_back_only_if_requested() -> None:
    spike = make_result(9.0, spike=True)
    ((after, rollback),) = run(make_policy(spike="roll-back"), [make_result(), spike])
    assert (after, rollback.first_step, rollback.last_step) == (2, 2, 2) and "9 at step 2" in rollback.reason
    assert not run(make_policy(spike="warn"), [make_result(), spike, spike])


def test_skipped_spikes_count_as_skipped() -> None:
    policy = make_policy(spike="skip", max_skipped=2)
    with pytest.raises(Diverged, match="far above recent ones"):
        run(policy, [make_result(5.0, skipped=True, spike=True)] * 2)


def test_fp16_overflows_are_counted_separately() -> None:
    policy = make_policy(max_skipped=2)
    run(policy, [make_result(skipped=True, overflow=True)] * 5)
    assert (policy.skipped, policy.overflows) == (0, 5)


def test_steps_are_checked_after_a_fixed_lag() -> None:
    policy = make_policy(lag=2, max_skipped=1, on_divergence="roll-back")
    ((after, rollback),) = run(policy, [make_result(), BAD, make_result(), make_result(), make_result()])
    assert (after, rollback.last_step) == (4, 2)
    assert policy.skipped == 1  # later steps were dropped from the queue


def test_check_all_leaves_no_step_unchecked() -> None:
    policy = make_policy(lag=2, max_skipped=1, on_divergence="roll-back")
    policy.enqueue(1, make_result())
    policy.enqueue(2, BAD)
    assert policy.check(2) is None
    rollback = policy.check(2, check_all=True)
    assert rollback is not None and rollback.last_step == 2


def test_consecutive_skips_continue_after_a_resume() -> None:
    one, two = make_policy(max_skipped=3), make_policy(max_skipped=3)
    run(one, [BAD, BAD])
    two.load_state_dict(one.state_dict())
    with pytest.raises(Diverged, match="1 to 3"):
        run(two, [BAD], first=3)
    assert two.skipped == 3


def test_position_history_keeps_recent_steps() -> None:
    history = PositionHistory(3)
    for step in range(1, 6):
        history.record(step, {"data": (8 * (step - 1), 8 * step), "other": (5, 5)})
    restored = PositionHistory(3)
    restored.load_state_dict(history.state_dict())
    assert restored.ranges_between(4, 5) == {"data": [[24, 32], [32, 40]]}
    assert restored.ranges_between(1, 3) == {"data": [[16, 24]]}  # older steps are forgotten
