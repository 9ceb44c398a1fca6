"""Gradient synchronization of several micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clustertrain.train.distributed.data_parallel import gradient_sync
from tests.unit.train.single_process import single_process_group


def test_ddp_reduces_gradients_once_per_step() -> None:
    sent: list[torch.Tensor] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
        sent.append(bucket.buffer().clone())
        future: Any = torch.futures.Future()  # type: ignore[no-untyped-call]
        future.set_result(bucket.buffer())
        return future

    counts = []
    with single_process_group():
        model = DistributedDataParallel(nn.Linear(2, 2))
        model.register_comm_hook(None, hook)
        for i in range(3):
            with gradient_sync(model, last=i == 2):
                model(torch.ones(1, 2)).sum().backward()
            counts.append(len(sent))
    assert counts == [0, 0, 1]
    assert sent[0].tolist() == [3.0] * 6  # the sum over all three


class Sharded(nn.Module):
    """Stand-in for a module with the methods of ``fully_shard``."""

    def __init__(self) -> None:
        super().__init__()
        self.reduces: list[bool] = []
        self.ends: list[bool] = []

    def set_requires_gradient_sync(self, on: bool) -> None:
        self.reduces.append(on)

    def set_is_last_backward(self, last: bool) -> None:
        self.ends.append(last)


@pytest.mark.parametrize(("defer", "reduces"), [(True, [False, False, True]), (False, [True, True, True])])
def test_fsdp_reduces_gradients_once_unless_defer_is_false(defer: bool, reduces: list[bool]) -> None:
    model = Sharded()
    for i in range(3):
        with gradient_sync(model, last=i == 2, defer=defer):
            pass
    assert model.reduces == reduces and model.ends == [False, False, True]
