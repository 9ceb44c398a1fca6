"""Gradients by central differences, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from clustertrain.diagnose.checks import gradients
from clustertrain.diagnose.checks.float64_mode import force_float64


class Square(torch.autograd.Function):
    """Its gradient is ``factor`` times the right one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.factor * 2 * ctx.saved_tensors[0] * grad, None


class Squared(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Square.apply(x, self.factor)
        return found


def model(factor: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Squared(factor), nn.Linear(4, 2)).double()


def inputs() -> torch.Tensor:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.001])
def test_the_module_with_a_wrong_gradient_is_named(factor: float) -> None:
    wrong = model(factor)
    found = gradients.find_faulty_module(wrong, (inputs(), None), lambda: wrong(inputs()).sum())
    assert found is not None and found[0] == "2 (Squared)" and found[1] > gradients.FAIL_ABOVE


def test_right_gradients_agree_to_many_digits() -> None:
    right = model()
    assert gradients.module_gradient_error(right, (inputs().requires_grad_(),), {}) < gradients.PASS_BELOW
    assert gradients.find_faulty_module(right, (inputs(), None), lambda: right(inputs()).sum()) is None


def test_a_kink_is_no_mistake() -> None:
    weight = torch.zeros(4, dtype=torch.float64, requires_grad=True)

    def loss() -> torch.Tensor:
        return torch.relu(weight).sum() + (weight - 1).square().sum()

    slopes = gradients.compute_slopes([("weight", weight)], loss, loss(), lambda done, total: None)
    assert max(s.error(gradients.typical_slope(slopes)) for s in slopes) < gradients.PASS_BELOW
    assert [v for v, _, _ in (gradients.assess(e, "w", None) for e in (1e-9, 1e-6, 1e-3))] == ["pass", "warn", "fail"]


def test_what_asks_for_float32_gets_float64() -> None:
    with force_float64():
        x = torch.ones(2)
        made = (x, x.float(), x.to(torch.float32), torch.zeros(1, dtype=torch.float32), x.half())
        assert {t.dtype for t in made} == {torch.float64}
    assert torch.ones(1).dtype == torch.float32
