"""What the host makes of steps: counts, ends, ways back; the same whenever the figures arrive."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from clustertrain.config.stability import StabilitySpec
from clustertrain.errors import Diverged
from clustertrain.train.core.step_types import StepResult
from clustertrain.train.stability.divergence import DivergencePolicy, PositionHistory, Rollback


def stepped(loss: float = 1.0, *, skipped: bool = False, spike: bool = False, overflow: bool = False) -> StepResult:
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


BAD = stepped(math.nan, skipped=True)


def run(supervisor: DivergencePolicy, steps: list[StepResult], first: int = 1) -> list[tuple[int, Rollback]]:
    """By the step after which it was known: what was to be done."""
    found = []
    for number, done in enumerate(steps, start=first):
        supervisor.enqueue(number, done)
        back = supervisor.check(number)
        if back is not None:
            found.append((number, back))
    return found


def of(lag: int = 0, **spec: Any) -> DivergencePolicy:
    return DivergencePolicy(StabilitySpec(**spec), lag)


def test_too_many_in_a_row_end_the_run_and_others_do_not() -> None:
    supervisor = of(max_skipped=3)
    run(supervisor, [stepped(), BAD, BAD, stepped(), BAD, BAD, stepped()])
    assert supervisor.skipped == 4
    with pytest.raises(Diverged, match="3 steps in a row skipped, 8 to 10: the loss is nan") as caught:
        run(supervisor, [BAD, BAD, BAD], first=8)
    assert caught.value.exit_code == 78 and "requeue" in caught.value.message


def test_or_the_run_goes_back_before_the_first_of_them() -> None:
    supervisor = of(max_skipped=3, then="roll-back")
    ((after, back),) = run(supervisor, [stepped(), BAD, BAD, BAD, stepped()])
    assert (after, back.first_step, back.last_step) == (4, 2, 4)
    assert not run(supervisor, [BAD, BAD, stepped()], first=2)  # counted anew


def test_a_spike_is_gone_back_for_at_once_and_only_where_it_is_asked() -> None:
    spike = stepped(9.0, spike=True)
    ((after, back),) = run(of(spike="roll-back"), [stepped(), spike])
    assert (after, back.first_step, back.last_step) == (2, 2, 2) and "9 at step 2" in back.reason
    assert not run(of(spike="warn"), [stepped(), spike, spike])


def test_spikes_that_are_skipped_count_as_skipped() -> None:
    supervisor = of(spike="skip", max_skipped=2)
    with pytest.raises(Diverged, match="far above the last ones"):
        run(supervisor, [stepped(5.0, skipped=True, spike=True)] * 2)


def test_what_fp16s_scale_takes_care_of_is_counted_apart() -> None:
    supervisor = of(max_skipped=2)
    run(supervisor, [stepped(skipped=True, overflow=True)] * 5)
    assert (supervisor.skipped, supervisor.overflows) == (0, 5)


def test_a_step_is_looked_at_a_fixed_number_of_steps_later() -> None:
    supervisor = of(lag=2, max_skipped=1, then="roll-back")
    ((after, back),) = run(supervisor, [stepped(), BAD, stepped(), stepped(), stepped()])
    assert (after, back.last_step) == (4, 2)
    assert supervisor.skipped == 1  # the steps after it were dropped with it


def test_before_a_checkpoint_nothing_is_unknown() -> None:
    supervisor = of(lag=2, max_skipped=1, then="roll-back")
    supervisor.enqueue(1, stepped())
    supervisor.enqueue(2, BAD)
    assert supervisor.check(2) is None
    back = supervisor.check(2, check_all=True)
    assert back is not None and back.last_step == 2


def test_a_row_goes_on_after_a_resume() -> None:
    one, two = of(max_skipped=3), of(max_skipped=3)
    run(one, [BAD, BAD])
    two.load_state_dict(one.state_dict())
    with pytest.raises(Diverged, match="1 to 3"):
        run(two, [BAD], first=3)
    assert two.skipped == 3


def test_a_trail_names_the_samples_of_the_last_steps() -> None:
    trail = PositionHistory(3)
    for step in range(1, 6):
        trail.record(step, {"data": (8 * (step - 1), 8 * step), "other": (5, 5)})
    again = PositionHistory(3)
    again.load_state_dict(trail.state_dict())
    assert again.ranges_between(4, 5) == {"data": [[24, 32], [32, 40]]}
    assert again.ranges_between(1, 3) == {"data": [[16, 24]]}  # more it does not know
