"""Models as the trainer builds them, on one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.plan.layout import Layout
from clustertrain.train.core.context import RankContext
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.parallelize import parallelize

CPU = torch.device("cpu")
ALONE = RankContext(0, 0, 1, 1, False, CPU, Layout(), "fp32", None, None, None, None, None)


def built(model: nn.Module, seed: int = 3) -> nn.Module:
    """On the CPU with the values that ``seed`` gives."""
    return parallelize(model, ALONE, ProcessGroups(None, None, None, None), seed)


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group, for what does not work without."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
