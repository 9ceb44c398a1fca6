"""The model and the data of digit_halves.toml: two networks, and images of digits cut into two."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Halves(TensorDataset):
    """Sample i is (image (64,) from 0 to 1, i)."""

    version = "scikit-learn's digits"

    def __init__(self) -> None:
        images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        super().__init__(images, torch.arange(len(images)))


class Towers(nn.Module):
    """Images (batch, 64) to embeddings (batch, dim) of their upper and of their lower halves."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.upper, self.lower = (
            nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, dim))
            for _ in range(2)
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.upper(images[:, :32]), self.lower(images[:, 32:])
