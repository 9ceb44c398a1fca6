"""Of several micro-batches the gradients travel between ranks with the last one alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clustertrain.train.distributed.data_parallel import gradient_sync
from tests.unit.train.alone import group_of_one


def test_replicas_sum_their_gradients_once() -> None:
    sent: list[torch.Tensor] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        sent.append(bucket.buffer().clone())
        done: Any = torch.futures.Future()  # type: ignore[no-untyped-call]
        done.set_result(bucket.buffer())
        return done

    counts = []
    with group_of_one():
        model = DistributedDataParallel(nn.Linear(2, 2))
        model.register_comm_hook(None, hook)
        for i in range(3):
            with gradient_sync(model, last=i == 2):
                model(torch.ones(1, 2)).sum().backward()
            counts.append(len(sent))
    assert counts == [0, 0, 1]
    assert sent[0].tolist() == [3.0] * 6  # of all three


class Sharded(nn.Module):
    """Has what ``fully_shard`` gives a module."""

    def __init__(self) -> None:
        super().__init__()
        self.reduces: list[bool] = []
        self.ends: list[bool] = []

    def set_requires_gradient_sync(self, on: bool) -> None:
        self.reduces.append(on)

    def set_is_last_backward(self, last: bool) -> None:
        self.ends.append(last)


@pytest.mark.parametrize(("defer", "reduces"), [(True, [False, False, True]), (False, [True, True, True])])
def test_shards_do_so_too_unless_memory_is_short(defer: bool, reduces: list[bool]) -> None:
    model = Sharded()
    for i in range(3):
        with gradient_sync(model, last=i == 2, defer=defer):
            pass
    assert model.reduces == reduces and model.ends == [False, False, True]
