"""Batches travel to the GPU beside the computation, and are what was read."""

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
    """Sample i: 100,000 times i, and i."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((100_000,), float(i)), i


def loader(device: str, workers: int) -> Loader:
    given: dict[str, Any] = {"global_batch": 64, "micro_batch": 32, "seed": 1, "rank": 0, "ranks": 1}
    return Loader(Rows(), workers=workers, device=torch.device(device), **given)


@pytest.mark.parametrize("workers", [0, 2])
def test_copied_batches_are_intact_while_gpu_is_busy(workers: int) -> None:
    here, there = loader("cpu", 0), loader("cuda", workers)
    busy = torch.randn(4096, 4096, device="cuda")
    sums = []
    for _ in range(16):
        busy = torch.tanh(busy @ busy)  # the copy must neither wait for it nor be overtaken by what uses the batch
        sums.append([(inputs.double().sum(), target.sum()) for inputs, target in next(there)])
    for found in sums:
        expected = [(inputs.double().sum(), target.sum()) for inputs, target in next(here)]
        assert [(float(a), int(b)) for a, b in found] == [(float(a), int(b)) for a, b in expected]
    there.close()
