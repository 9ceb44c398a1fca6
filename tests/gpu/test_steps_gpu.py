"""Steps on a GPU: they do not wait for the device, and steps with NaN or Inf change nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import clustertrain as ct
from clustertrain.train.stability import conditional_step

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

WIDTH = 64


@pytest.fixture
def session() -> Iterator[ct.Session]:
    with ct.session(device="cuda") as opened:
        yield opened


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch(value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((8, WIDTH), value, device="cuda"), torch.ones(8, WIDTH, device="cuda")


@pytest.mark.parametrize("mode", ["norm", "value", "adaptive"])
def test_step_does_not_wait_for_device(session: ct.Session, mode: Any) -> None:
    session.parallelize(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
    session.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
    clip = ct.Clipping(mode, norm=1.0, value=0.01)
    for value in (1.0, 2.0):  # the first step creates the optimizer's state and therefore reads the flag
        session.train_step(batch(value), loss, clip=clip)
    batches = [batch(), batch(math.nan), batch()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [session.train_step(b, loss, clip=clip) for b in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [bool(result.skipped) for result in results] == [False, True, False]


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_skipped_step_changes_no_bit(session: ct.Session, cls: Any, options: dict[str, Any]) -> None:
    model = session.parallelize(nn.Linear(WIDTH, WIDTH))
    optimizer = session.optimizer(cls, lr=1e-3, **options)

    def snapshot() -> list[torch.Tensor]:
        states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [t.detach().clone() for t in (*model.parameters(), *states)]

    assert session.train_step(batch(math.nan), loss).skipped and not optimizer.state
    session.train_step(batch(), loss)
    assert conditional_step.supports_device_skip(optimizer) == options.get("fused", False)
    before = snapshot()
    assert session.train_step(batch(math.inf), loss).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
    assert not session.train_step(batch(), loss).skipped
    assert not torch.equal(before[0], snapshot()[0])
