"""The model and the data set of digit_halves.toml: two encoders, and images of digits cut in half."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Halves(TensorDataset):
    """Images of digits: sample i is (image (64,) from 0 to 1, i)."""

    version = "scikit-learn's digits"

    def __init__(self) -> None:
        images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        super().__init__(images, torch.arange(len(images)))


class Towers(nn.Module):
    """Map images (batch, 64) to embeddings (batch, dim) of their upper halves and of their lower halves."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.upper, self.lower = (
            nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, dim))
            for _ in range(2)
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.upper(images[:, :32]), self.lower(images[:, 32:])
