"""fp16 loss scaling, and fp32 weights and state at every precision, on one process."""

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
from tests.unit.train.single_process import ALONE

BATCH = (torch.arange(12.0).reshape(4, 3) / 8, torch.ones(4, 2))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def make_step(scale: LossScale | None, optimizer: Any = torch.optim.AdamW, **context: Any) -> TrainStep:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = optimizer(model.parameters(), lr=0.1)
    return TrainStep(
        model, optimizer, dataclasses.replace(ALONE, **context), ProcessGroups(None, None, None, None), scale
    )


def weights(step: TrainStep) -> list[torch.Tensor]:
    return [p.detach().clone() for p in step.optimizer.param_groups[0]["params"]]


def run_step(step: TrainStep, clip: Clipping | None = None) -> StepResult:
    return step(BATCH, None, loss, clip or Clipping())


def test_loss_scale_halves_and_doubles() -> None:
    scale = LossScale(growth_interval=3)
    scales = []
    for overflow in (True, False, False, False, False, True):
        assert not scale.update(overflow=overflow)
        scales.append(scale.scale / 2**16)
    assert scales == [0.5, 0.5, 0.5, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("loss_terms", [1, 4096, 131_072])
def test_loss_scale_halves_16_times_for_any_number_of_terms(loss_terms: int) -> None:
    scale = LossScale(loss_terms)
    for _ in range(16):
        before = scale.scale
        assert not scale.update(overflow=True) and scale.scale == before / 2
    floor = scale.scale
    assert scale.update(overflow=True) and scale.scale == floor


def test_loss_scale_state_survives_a_checkpoint() -> None:
    scale, restored = LossScale(growth_interval=5), LossScale(growth_interval=5)
    for overflow in (True, False, False, False):
        scale.update(overflow=overflow)
    restored.load_state_dict(scale.state_dict())
    for _ in range(2):
        scale.update(overflow=False)
        restored.update(overflow=False)
        assert (scale.scale, scale.good_steps) == (restored.scale, restored.good_steps)
    assert scale.good_steps == 0  # both have just doubled


def test_gradient_is_unscaled_before_clipping() -> None:
    for clip in (Clipping(norm=0.1), Clipping("value", value=0.05)):
        # SGD, because Adam's first step is the same for any gradient scale.
        plain, scaled = make_step(None, torch.optim.SGD), make_step(LossScale(), torch.optim.SGD)
        one, other = run_step(plain, clip), run_step(scaled, clip)
        assert one.clipped and other.clipped and other.grad_norm == pytest.approx(one.grad_norm.item(), rel=1e-6)
        for a, b in zip(weights(plain), weights(scaled), strict=True):
            assert torch.allclose(a, b, rtol=1e-6)


def test_overflow_skips_the_step_and_halves_the_scale() -> None:
    scale = LossScale()
    scale.scale = 2.0**127  # overflows the gradient in fp32
    step = make_step(scale)
    before = weights(step)
    first = run_step(step)
    assert (bool(first.skipped), first.overflow, bool(first.finite)) == (True, True, False)
    assert math.isfinite(first.loss.item())
    assert all(torch.equal(a, b) for a, b in zip(before, weights(step), strict=True)) and not step.optimizer.state
    assert scale.scale == 2.0**126
    while run_step(step).overflow:
        pass
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(step), strict=True))


def test_nan_loss_is_not_reported_as_overflow() -> None:
    step = make_step(LossScale())
    result = step((BATCH[0] * math.nan, BATCH[1]), None, loss, Clipping())
    assert result.skipped and not result.overflow


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_gradients_and_state_are_fp32(precision: str, dtype: torch.dtype) -> None:
    step = make_step(None, precision=precision)
    seen: set[torch.dtype] = set()

    def recording_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.add(output.dtype)
        return loss(output.float(), target)

    params = step.optimizer.param_groups[0]["params"]
    grads: set[torch.dtype] = set()
    for p in params:
        p.register_post_accumulate_grad_hook(lambda p: grads.add(p.grad.dtype))
    step(BATCH, None, recording_loss, Clipping())
    state = [v for s in step.optimizer.state.values() for v in s.values()]
    assert seen == {dtype} and len(state) == 6
    assert {t.dtype for t in (*params, *state)} | grads == {torch.float32}
