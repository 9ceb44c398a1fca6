"""A model with a layer that does not affect the loss. The argument, ``train-step`` or ``custom-loop``, selects how it
is trained."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import clustertrain as ct


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


CUSTOM_LOOP = sys.argv[1] == "custom-loop"
with ct.session() as session:
    model = session.parallelize(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if CUSTOM_LOOP else session.optimizer("sgd", lr=0.1)
    for _ in session.steps(total=3, state={"model": model, "optimizer": optimizer}):
        x = torch.ones(4, 8, device=session.device)
        if CUSTOM_LOOP:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            session.train_step((x, x), F.mse_loss)
