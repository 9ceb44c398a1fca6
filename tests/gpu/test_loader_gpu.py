"""Batches are copied to the GPU during the computation and arrive intact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clustertrain.train.data.loader import Loader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    # torch warns on machines with fewer cores than workers.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Rows:
    """Dataset whose sample i is a tensor of 100,000 times i, and i."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((100_000,), float(i)), i


def loader(device: str, workers: int) -> Loader:
    options: dict[str, Any] = {"global_batch": 64, "micro_batch": 32, "seed": 1, "rank": 0, "ranks": 1}
    return Loader(Rows(), workers=workers, device=torch.device(device), **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_copied_batches_are_intact_while_gpu_is_busy(workers: int) -> None:
    on_cpu, on_gpu = loader("cpu", 0), loader("cuda", workers)
    busy = torch.randn(4096, 4096, device="cuda")
    sums = []
    for _ in range(16):
        busy = torch.tanh(busy @ busy)  # the copy must not wait for it, but be complete before the batch is used
        sums.append([(inputs.double().sum(), target.sum()) for inputs, target in next(on_gpu)])
    for actual in sums:
        expected = [(inputs.double().sum(), target.sum()) for inputs, target in next(on_cpu)]
        assert [(float(a), int(b)) for a, b in actual] == [(float(a), int(b)) for a, b in expected]
    on_gpu.close()
