"""A training script with a custom model in pipeline stages: named inputs, several targets, and a mean loss."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import nn

import clustertrain as ct


class Tower(nn.Module):
    """Model with a buffer outside its units, and a unit with buffers that each forward pass changes."""

    pipeline_units: ClassVar[Any] = ("enter", "trunk.0", "trunk.1", ("leave", "weigh"))

    def __init__(self) -> None:
        super().__init__()
        self.enter: nn.Module | None = nn.Linear(6, 8)
        self.trunk = nn.ModuleList([CallCounter(8), nn.BatchNorm1d(8)])
        self.leave: nn.Module | None = nn.Linear(8, 3)
        self.weigh: nn.Module | None = nn.Linear(3, 3)
        self.register_buffer("offset", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        if self.enter is not None and shift is not None:
            x = self.enter(x + shift) + self.offset
        for block in self.trunk:
            x = block(x)
        return self.weigh(self.leave(x)) if self.leave is not None and self.weigh is not None else x


class CallCounter(nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(super().forward(x))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Samples:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        rng = torch.Generator().manual_seed(i)
        inputs = {"x": torch.randn(6, generator=rng), "shift": torch.full((6,), 0.1)}
        return inputs, (torch.randn(3, generator=rng), torch.ones(1))


def loss_fn(output: torch.Tensor, target: Any) -> torch.Tensor:
    expected, weight = target
    return ((output - expected).square().mean(1, keepdim=True) * weight).mean()


with ct.session() as session:
    model = session.parallelize(Tower())
    optimizer = session.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    data = session.loader(Samples(), global_batch=8, micro_batch=2)
    state = {"model": model, "optimizer": optimizer, "data": data}
    for _ in session.steps(int(sys.argv[1]), state, checkpoint_every=2):
        result = session.train_step(next(data), loss_fn, clip_norm=1.0)
        batches = dict(model.named_buffers()).get("trunk.1.num_batches_tracked", torch.zeros(()))
        session.log(loss=result.loss, grad_norm=result.grad_norm, batches=int(batches))
