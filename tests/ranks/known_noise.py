"""A problem whose gradient noise scale is known: 16 samples."""

from __future__ import annotations

import torch
from torch import nn

DIM = 4000
NOISE, DISTANCE = 2.0, 0.5  # standard deviation of a sample's gradient, and the true gradient, per element
NOISE_SCALE = NOISE**2 / DISTANCE**2


class Quadratic(nn.Module):
    """A vector; the gradient of its loss for a sample is proportional to their difference."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.full((DIM,), DISTANCE))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.vector - inputs


class Samples:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return NOISE * torch.randn(DIM, generator=torch.Generator().manual_seed(i)), torch.zeros(DIM)
