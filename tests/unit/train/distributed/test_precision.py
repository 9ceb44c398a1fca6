"""fp16's loss scale, and what stays fp32 whatever is computed in, on one process."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain.train.core.step_types import StepResult
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.precision import LossScale
from clustertrain.train.stability.clipping import Clipping
from clustertrain.train.step.train_step import TrainStep
from tests.unit.train.alone import ALONE

TARGET = (torch.arange(12.0).reshape(4, 3) / 8, torch.ones(4, 2))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def step_of(scale: LossScale | None, optimizer: Any = torch.optim.AdamW, **context: Any) -> TrainStep:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = optimizer(model.parameters(), lr=0.1)
    return TrainStep(
        model, optimizer, dataclasses.replace(ALONE, **context), ProcessGroups(None, None, None, None), scale
    )


def weights(step: TrainStep) -> list[torch.Tensor]:
    return [p.detach().clone() for p in step.optimizer.param_groups[0]["params"]]


def done(step: TrainStep, clip: Clipping | None = None) -> StepResult:
    return step(TARGET, None, loss, clip or Clipping())


def test_the_scale_is_halved_by_an_overflow_and_doubled_after_so_many_steps_without() -> None:
    scale = LossScale(growth_interval=3)
    seen = []
    for overflow in (True, False, False, False, False, True):
        assert not scale.update(overflow=overflow)
        seen.append(scale.scale / 2**16)
    assert seen == [0.5, 0.5, 0.5, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("summed", [1, 4096, 131_072])
def test_of_a_sum_of_any_number_of_terms_the_scale_can_be_halved_as_often(summed: int) -> None:
    scale = LossScale(summed)
    for _ in range(16):
        before = scale.scale
        assert not scale.update(overflow=True) and scale.scale == before / 2
    least = scale.scale
    assert scale.update(overflow=True) and scale.scale == least


def test_the_scale_and_its_count_are_in_the_checkpoint() -> None:
    scale, back = LossScale(growth_interval=5), LossScale(growth_interval=5)
    for overflow in (True, False, False, False):
        scale.update(overflow=overflow)
    back.load_state_dict(scale.state_dict())
    for _ in range(2):
        scale.update(overflow=False)
        back.update(overflow=False)
        assert (scale.scale, scale.good_steps) == (back.scale, back.good_steps)
    assert scale.good_steps == 0  # both have doubled by now


def test_the_gradient_is_unscaled_before_it_is_clipped() -> None:
    for clip in (Clipping(norm=0.1), Clipping("value", value=0.05)):
        # Adam's first step would be the same of any gradient.
        plain, scaled = step_of(None, torch.optim.SGD), step_of(LossScale(), torch.optim.SGD)
        one, other = done(plain, clip), done(scaled, clip)
        assert one.clipped and other.clipped and other.grad_norm == pytest.approx(one.grad_norm.item(), rel=1e-6)
        for a, b in zip(weights(plain), weights(scaled), strict=True):
            assert torch.allclose(a, b, rtol=1e-6)


def test_a_step_that_overflows_is_skipped_and_the_next_one_has_half_the_scale() -> None:
    scale = LossScale()
    scale.scale = 2.0**127  # in fp32 the gradient of such a loss is none
    step = step_of(scale)
    before = weights(step)
    first = done(step)
    assert (bool(first.skipped), first.overflow, bool(first.finite)) == (True, True, False)
    assert math.isfinite(first.loss.item())
    assert all(torch.equal(a, b) for a, b in zip(before, weights(step), strict=True)) and not step.optimizer.state
    assert scale.scale == 2.0**126
    while done(step).overflow:
        pass
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(step), strict=True))


def test_a_loss_that_is_none_before_it_is_scaled_is_not_the_scales() -> None:
    step = step_of(LossScale())
    found = step((TARGET[0] * math.nan, TARGET[1]), None, loss, Clipping())
    assert found.skipped and not found.overflow


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_gradients_and_state_are_fp32_whatever_is_computed_in(precision: str, dtype: torch.dtype) -> None:
    step = step_of(None, precision=precision)
    seen: set[torch.dtype] = set()

    def watched(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.add(output.dtype)
        return loss(output.float(), target)

    params = step.optimizer.param_groups[0]["params"]
    grads: set[torch.dtype] = set()
    for p in params:
        p.register_post_accumulate_grad_hook(lambda p: grads.add(p.grad.dtype))
    step(TARGET, None, watched, Clipping())
    state = [v for s in step.optimizer.state.values() for v in s.values()]
    assert seen == {dtype} and len(state) == 6
    assert {t.dtype for t in (*params, *state)} | grads == {torch.float32}
