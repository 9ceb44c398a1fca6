"""Gradient checks by central differences in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.diagnose.checks import gradients
from clustertrain.diagnose.checks.float64_mode import force_float64
from clustertrain.diagnose.subject import Subject
from clustertrain.plan.layout import Batch
from clustertrain.run.run_dir import RunDir


class Square(torch.autograd.Function):
    """A square whose gradient is ``factor`` times the correct one."""

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
        output: torch.Tensor = Square.apply(x, self.factor)
        return output


def build_model(factor: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Squared(factor), nn.Linear(4, 2)).double()


def random_inputs() -> torch.Tensor:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.001])
def test_module_with_wrong_gradient_is_named(factor: float) -> None:
    model = build_model(factor)
    faulty_module = gradients.find_faulty_module(model, (random_inputs(), None), lambda: model(random_inputs()).sum())
    assert faulty_module is not None
    assert faulty_module[0] == "2 (Squared)" and faulty_module[1] > gradients.FAIL_ABOVE


def test_correct_gradients_agree_to_many_digits() -> None:
    model = build_model()
    assert gradients.module_gradient_error(model, (random_inputs().requires_grad_(),), {}) < gradients.PASS_BELOW
    assert gradients.find_faulty_module(model, (random_inputs(), None), lambda: model(random_inputs()).sum()) is None


def test_kink_is_not_an_error() -> None:
    weight = torch.zeros(4, dtype=torch.float64, requires_grad=True)

    def loss() -> torch.Tensor:
        return torch.relu(weight).sum() + (weight - 1).square().sum()

    slopes = gradients.compute_slopes([("weight", weight)], loss, loss(), lambda done, total: None)
    assert max(s.error(gradients.typical_slope(slopes)) for s in slopes) < gradients.PASS_BELOW
    assert [v for v, _, _ in (gradients.assess(e, "w", None) for e in (1e-9, 1e-6, 1e-3))] == ["pass", "warn", "fail"]


def test_force_float64_overrides_narrower_dtypes() -> None:
    with force_float64():
        x = torch.ones(2)
        tensors = (x, x.float(), x.to(torch.float32), torch.zeros(1, dtype=torch.float32), x.half())
        assert {t.dtype for t in tensors} == {torch.float64}
    assert torch.ones(1).dtype == torch.float32


def test_fine_tune_of_a_large_model_is_checked_on_a_small_random_one() -> None:
    model = {"init": "/weights", "dim": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128}
    recipe = build({"model": model, "adapter": {"kind": "lora", "rank": 64}}, Recipe, "recipe")
    subject = Subject(recipe, Batch(), RunDir(Path("nowhere")), torch.device("cpu"))
    small = gradients._shrink_model(subject).recipe
    assert (small.model.init, small.model.dim, small.adapter.rank) == ("", 32, 8)
